// Accumulate: folds gradients into accumulators, and sums the squares of the result.
#pragma once
#include "block.cuh"
#include "work.cuh"

namespace accumfused::AF_TARGET {

// In the place of the weight that all accumulators of a launch wait for.
constexpr int32_t kEachItsOwn = kOverwrite - 1;

template <bool kKeep, bool kAdd, class G>
__device__ void fold_chunk(float* accumulator, const G* grad, int n, bool aligned, float keep, float add,
                           float (&lanes)[kWidth]) {
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
}

__global__ void __launch_bounds__(Policy::kThreads, Policy::kFoldBlocks)
    accumulate_kernel(const Work work, const __grid_constant__ Fold fold, const int32_t common) {
  wait_for_launches_in_front();
  const float add = fold.factor(fold.weight);
  for (int piece = int(blockIdx.x); piece < work.pieces; piece += int(gridDim.x)) {
    const Piece at = piece_of(work, piece);
    if (at.in.accumulator == nullptr) continue;
    float* const accumulator = global(at.in.accumulator + at.offset);
    const int n = at.n;
    const int32_t held = common == kEachItsOwn ? at.in.weight : common;
    if (held == kOverwrite) {
      with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
        for_each_row<Policy::kFoldRows>(n, aligned && is_aligned(accumulator, 4), [&](auto access, int i) {
          float g[access.kCount][kWidth];
          access.load(grad, i, n, g);
          access.store(accumulator, i, n, g);
        });
      });
      continue;
    }
    const float keep = fold.factor(held);
    float lanes[kWidth] = {};
    if (at.in.grad == nullptr || add == 0.0f) {
      if (keep != 0.0f) fold_chunk<true, false>(accumulator, accumulator, n, true, keep, add, lanes);
      else fold_chunk<false, false>(accumulator, accumulator, n, true, keep, add, lanes);
    } else {
      with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
        if (keep != 0.0f) fold_chunk<true, true>(accumulator, grad, n, aligned, keep, add, lanes);
        else fold_chunk<false, true>(accumulator, grad, n, aligned, keep, add, lanes);
      });
    }
    store_sum(lanes, fold.partials + piece);
  }
}

}  // namespace accumfused::AF_TARGET
