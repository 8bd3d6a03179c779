// Count: a pass over the gradients of a measured step. Each chunk's sum of squares, as the norm takes it, how many of
// its values are zeros, and how many are not finite. Both numbers are whole and at most 32768, so floats add them up
// exactly.
#pragma once
#include "norm.cuh"

namespace accumfused::AF_TARGET {

// counts: [2][chunks].
__global__ void __launch_bounds__(Policy::kThreads, Policy::kNormBlocks)
    count_kernel(const Work work, float* partials, float* counts) {
  wait_for_launches_in_front();
  let_next_launch_begin();
  for (int chunk = int(blockIdx.x); chunk < work.pieces; chunk += int(gridDim.x)) {
    const Piece at = piece_of(work, chunk);
    if (at.in.grad == nullptr) continue;
    float lanes[kWidth] = {};
    int others = 0, nonfinite = 0;  // others than zeros, which stand in the place of missing elements too
    with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
      for_each_row<1>(at.n, aligned, [&](auto access, int i) {
        float g[1][kWidth];
        access.load(grad, i, at.n, g);
#pragma unroll
        for (int k = 0; k < kWidth; ++k) {
          const uint32_t size = bits_of(g[0][k]) & 0x7fffffffu;
          others += size != 0;
          nonfinite += size >= 0x7f800000u;
        }
        add_squares(g, lanes);
      });
    });
    store_sum(lanes, partials + chunk);
    const float of_others[kWidth] = {float(others)}, of_nonfinite[kWidth] = {float(nonfinite)};
    store_sum(of_others, counts + chunk);
    store_sum(of_nonfinite, counts + work.pieces + chunk);
    if (threadIdx.x == 0) counts[chunk] = float(at.n) - counts[chunk];  // written by the thread that reads it
  }
}

}  // namespace accumfused::AF_TARGET
