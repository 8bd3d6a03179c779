// What one launch leaves in the device's memory for those that follow: words, and copies of step counts.
#pragma once
#include "work.cuh"

namespace accumfused::AF_TARGET {

// Words that a launch carries in its own arguments, of those from work.words on: no staging memory that an earlier
// launch may still read, and nothing to wait for.
template <int kSize>
struct Packet {
  static constexpr int kBytes = kSize;
  int begin = 0, end = 0;  // which ones
  Word words[kSize / sizeof(Word)];

  __device__ Word word(const Work& work, int i) const {
    return begin <= i && i < end ? words[i - begin] : work.words[i];
  }
  // Writes them, spread over the grid, for the launches that follow. This one reads none of these in memory.
  __device__ void deliver(const Work& work) const {
    const int threads = int(gridDim.x) * Policy::kThreads;
    for (int i = begin + int(blockIdx.x * Policy::kThreads + threadIdx.x); i < end; i += threads) {
      work.words[i] = words[i - begin];
    }
  }
};

// Rows are spread over the grid, from its last thread block on, which has the fewest pieces. i: this thread's first row
// that is left.
__device__ inline int first_counted() { return int(gridDim.x - 1 - blockIdx.x) * Policy::kThreads + int(threadIdx.x); }
template <class Body>
__device__ void for_each_count(const Work& work, int i, const Body& body) {
#pragma unroll 1
  for (const int threads = int(gridDim.x) * Policy::kThreads; i < work.count; i += threads) {
    const Row& row = work.rows[work.first_row + i];
    if (row.step != nullptr) body(work.first_row + i, row);
  }
}

// A step's thread blocks all read step counts, so one may write them only when the others have read: the norm in front
// of the step copies the counts, and the step reads the copies. A thread asks for its first row's count when this is
// made, in front of other work, because the way to it waits for memory twice.
class Counts {
 public:
  __device__ explicit Counts(const Work& work) {
    const int i = first_counted();
    const float* const step = i < work.count ? work.rows[work.first_row + i].step : nullptr;
    is_counted_ = step != nullptr, first_ = is_counted_ ? *step : 0.0f;
  }
  __device__ void copy(const Work& work) const {
    const int i = first_counted();
    if (is_counted_) work.counts[work.first_row + i] = first_;
    for_each_count(work, i + int(gridDim.x) * Policy::kThreads,
                   [&](int row, const Row& of) { work.counts[row] = *of.step; });
  }

 private:
  bool is_counted_;
  float first_;
};

// In front of launches that carry no words themselves; and copies step counts, for a step that no norm has gone before.
template <int kBytes>
__global__ void __launch_bounds__(Policy::kThreads)
    write_kernel(const Work work, const __grid_constant__ Packet<kBytes> packet) {
  const Counts counts(work);
  packet.deliver(work);
  counts.copy(work);
}

}  // namespace accumfused::AF_TARGET
