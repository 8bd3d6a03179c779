// Accumulate: folds gradients into accumulators, and sums the squares of the result.
#pragma once
#include "block.cuh"
#include "packet.cuh"

namespace accumfused::AF_TARGET {

// sum <- (sum if kKeep) + (factor * grad if kAdd).
template <bool kKeep, bool kAdd, class G>
__device__ void fold_chunk(float* sum, const G* grad, int n, bool aligned, float factor, float (&lanes)[kWidth]) {
  for_each_row<Policy::kFoldRows>(n, aligned && is_aligned(sum, 4), [&](auto access, int i) {
    float value[access.kCount][kWidth];
    [[maybe_unused]] float g[access.kCount][kWidth];
    if constexpr (kKeep) access.load(sum, i, n, value);
    if constexpr (kAdd) access.load(grad, i, n, g);
#pragma unroll
    for (int r = 0; r < access.kCount; ++r) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float folded = kKeep ? value[r][k] : 0.0f;
        if constexpr (kAdd) folded = kKeep ? folded + g[r][k] * factor : g[r][k] * factor;
        value[r][k] = folded;
        lanes[k] += folded * folded;
      }
    }
    access.store(sum, i, n, value);
  });
}

template <int kBytes>
__global__ void __launch_bounds__(Policy::kThreads, Policy::kFoldBlocks)
    accumulate_kernel(const Work work, const __grid_constant__ Packet<kBytes> packet,
                      const __grid_constant__ Fold fold) {
  packet.deliver(work);
  const bool is_fresh = fold.is_fresh(), keeps = !fold.overwrites && !is_fresh;
  const float factor = is_fresh && !fold.overwrites ? 1.0f : fold.multiplier();
  for (int piece = int(blockIdx.x); piece < work.pieces; piece += int(gridDim.x)) {
    const Piece at = piece_of(work, piece, [&](int i) { return packet.word(work, work.count + i); });
    float* const own = reinterpret_cast<float*>(packet.word(work, int(at.index)));
    if (own == nullptr || (at.in.grad == nullptr && !is_fresh)) continue;
    float* const sum = global(own + at.offset);
    const int n = at.n;
    if (fold.copies()) {
      with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
        for_each_row<Policy::kFoldRows>(n, aligned && is_aligned(sum, 4), [&](auto access, int i) {
          float g[access.kCount][kWidth];
          access.load(grad, i, n, g);
          access.store(sum, i, n, g);
        });
      });
      continue;
    }
    float lanes[kWidth] = {};
    if (at.in.grad == nullptr || factor == 0.0f) {
      if (keeps) fold_chunk<true, false>(sum, sum, n, true, factor, lanes);
      else fold_chunk<false, false>(sum, sum, n, true, factor, lanes);
    } else {
      with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
        if (keeps) fold_chunk<true, true>(sum, grad, n, aligned, factor, lanes);
        else fold_chunk<false, true>(sum, grad, n, aligned, factor, lanes);
      });
    }
    store_sum(lanes, fold.partials + piece);
  }
}

}  // namespace accumfused::AF_TARGET
