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

// As fold_chunk; the lanes are those of the result, of the accumulator before, and of the gradient as it comes. One
// loop for all factors, because it is seldom asked for.
template <class G>
__device__ void fold_measured(float* accumulator, const G* grad, int n, bool aligned, float keep, float add,
                              float (&lanes)[3][kWidth]) {
  for_each_row<1>(n, aligned && is_aligned(accumulator, 4), [&](auto access, int i) {
    float value[1][kWidth], g[1][kWidth];
    access.load(accumulator, i, n, value);
    access.load(grad, i, n, g);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      lanes[1][k] += value[0][k] * value[0][k];
      lanes[2][k] += g[0][k] * g[0][k];
      const float kept = keep != 0.0f ? value[0][k] * keep : 0.0f, added = g[0][k] * add;
      value[0][k] = add == 0.0f ? kept : keep == 0.0f ? added : kept + added;
      lanes[0][k] += value[0][k] * value[0][k];
    }
    access.store(accumulator, i, n, value);
  });
}

// A fold that also measures: see rows.h, Fold::squares. None of its accumulators is empty.
__global__ void __launch_bounds__(Policy::kThreads)
    measure_kernel(const Work work, const __grid_constant__ Fold fold, const int32_t common) {
  wait_for_launches_in_front();
  __shared__ float own[2];
  for (int chunk = int(blockIdx.x); chunk < work.pieces; chunk += int(gridDim.x)) {
    const Piece at = piece_of(work, chunk);
    Operands in = at.in;
    if (in.accumulator == nullptr) continue;
    const int32_t held = common == kEachItsOwn ? in.weight : common;
    const float keep = fold.factor(held);
    const float add = in.grad ? fold.factor(fold.weight) : 0.0f;
    if (add == 0.0f) in.grad = in.accumulator, in.grad_dtype = Dtype::kFloat32;  // read, and left out
    float lanes[3][kWidth] = {};
    with_grad(in, at.offset, [&](const auto* grad, bool aligned) {
      fold_measured(global(in.accumulator + at.offset), grad, at.n, aligned, keep, add, lanes);
    });
    store_sum(lanes[0], fold.partials + chunk);
    store_sum(lanes[1], own);
    store_sum(lanes[2], own + 1);
    if (threadIdx.x != 0) continue;  // this thread has written them
    const float held_share = fold.share(held), grad_share = fold.share(fold.weight);
    float sum = fold.squares[chunk];
    if (held_share != 0.0f && keep != 0.0f) sum += held_share * own[0];
    if (grad_share != 0.0f && add != 0.0f) sum += grad_share * own[1];
    fold.squares[chunk] = sum;
  }
}

}  // namespace accumfused::AF_TARGET
