// Step counts. A step's thread blocks all read them, so one may write them only when the others have read: the norm in
// front of the step copies the counts, and the step reads the copies. Rows are spread over the grid, from its last
// thread block on, which has the fewest pieces.
#pragma once
#include "work.cuh"

namespace accumfused::AF_TARGET {

template <class Body>
__device__ void for_each_count(const Work& work, const Body& body) {
  const int threads = int(gridDim.x) * Policy::kThreads;
  for (int i = int(gridDim.x - 1 - blockIdx.x) * Policy::kThreads + int(threadIdx.x); i < work.count; i += threads) {
    if (work.rows[i].step != nullptr) body(i, work.rows[i]);
  }
}

__device__ inline void copy_counts(const Work& work) {
  for_each_count(work, [&](int i, const Row& row) { work.counts[i] = *row.step; });
}

// For a step that no norm has gone before.
__global__ void __launch_bounds__(Policy::kThreads) counts_kernel(const Work work) { copy_counts(work); }

}  // namespace accumfused::AF_TARGET
