// Accumulate: folds gradients into accumulators, and sums the squares of the result.
#pragma once
#include "block.cuh"
#include "work.cuh"

namespace accumfused::AF_TARGET {

template <bool kKeep, bool kAdd, class G>
__device__ void fold_chunk(float* accumulator, const G* grad, int n, bool aligned, float keep, float add, float* sum) {
  float lanes[kWidth] = {};
  for_each_row<Policy::kFoldRows>(n, aligned && is_aligned(accumulator, 4), [&](auto access, int i) {
    float value[access.kCount][kWidth];
    [[maybe_unused]] float g[access.kCount][kWidth];
    if constexpr (kKeep) access.load(accumulator, i, n, value);
    if constexpr (kAdd) access.load(grad, i, n, g);
#pragma unroll
    for (int r = 0; r < access.kCount; ++r) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float folded = 0.0f;
        if constexpr (kKeep) folded = value[r][k] * keep;
        if constexpr (kAdd) folded = kKeep ? folded + g[r][k] * add : g[r][k] * add;
        value[r][k] = folded;
        lanes[k] += folded * folded;
      }
    }
    access.store(accumulator, i, n, value);
  });
  store_sum(lanes, sum);
}

__global__ void __launch_bounds__(Policy::kThreads, Policy::kFoldBlocks)
    accumulate_kernel(const Work work, const Fold fold) {
  const double scale = fold.whole_scale();
  const float add = float(fold.weights[fold.weight] * scale);
  for (int chunk = int(blockIdx.x); chunk < work.chunks; chunk += int(gridDim.x)) {
    const Chunk at = chunk_of(work, chunk);
    if (at.in.accumulator == nullptr) continue;
    float* const accumulator = global(at.in.accumulator + at.offset);
    float* const sum = fold.partials + chunk;
    const int n = at.n;
    if (at.in.weight == kOverwrite) {
      with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
        for_each_row<Policy::kFoldRows>(n, aligned && is_aligned(accumulator, 4), [&](auto access, int i) {
          float g[access.kCount][kWidth];
          access.load(grad, i, n, g);
          access.store(accumulator, i, n, g);
        });
      });
      continue;
    }
    const float keep = float(fold.weights[at.in.weight] * scale);
    if (at.in.grad == nullptr || add == 0.0f) {
      if (keep != 0.0f) fold_chunk<true, false>(accumulator, accumulator, n, true, keep, add, sum);
      else fold_chunk<false, false>(accumulator, accumulator, n, true, keep, add, sum);
      continue;
    }
    with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
      if (keep != 0.0f) fold_chunk<true, true>(accumulator, grad, n, aligned, keep, add, sum);
      else fold_chunk<false, true>(accumulator, grad, n, aligned, keep, add, sum);
    });
  }
}

}  // namespace accumfused::AF_TARGET
