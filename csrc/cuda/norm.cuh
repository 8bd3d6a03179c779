// Norm: each chunk's sum of squares; the last thread block makes the coefficient of them. It copies the step counts
// besides. And sums of runs of chunks.
#pragma once
#include "../norm.h"
#include "block.cuh"
#include "formats.cuh"
#include "packet.cuh"

namespace accumfused::AF_TARGET {

template <int kRows>
__device__ void add_squares(const float (&g)[kRows][kWidth], float (&lanes)[kWidth]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) lanes[k] += g[r][k] * g[r][k];
  }
}

// Of a chunk's gradient, the lanes of its sum of squares.
__device__ inline void measure_chunk(const Piece& at, float (&lanes)[kWidth]) {
  with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
    constexpr int kRows = Policy::kNormRows, kBatch = kRows * int(kLanes);
    const int whole = aligned ? at.n / kBatch * kBatch : 0;
    int i = int(threadIdx.x) * kWidth;
    const auto add = [&](auto access) {
      float g[kRows][kWidth];
      access.load(grad, i, at.n, g);
      add_squares(g, lanes);
    };
#pragma unroll 1
    for (; i < whole; i += kBatch) add(Access<true, kRows>());
    // The rest waits for memory once, too. What is missing reads as 0, and a square of 0 changes no sum of squares.
#pragma unroll 1
    for (; i < at.n; i += kBatch) add(Access<false, kRows>());
  });
}

// partials[chunk]: the sum of squares of each chunk that has a gradient.
template <int kBytes>
__device__ void sum_squares(const Work& work, const Packet<kBytes>& packet, float* partials) {
  for (int chunk = int(blockIdx.x); chunk < work.pieces; chunk += int(gridDim.x)) {
    const Piece at = piece_of(work, chunk, [&](int i) { return packet.word(work, i); });
    if (at.in.grad == nullptr) continue;
    float lanes[kWidth] = {};
    measure_chunk(at, lanes);
    store_sum(lanes, partials + chunk);
  }
}

// `reads`: there are gradients whose sums of squares are missing from partials.
template <int kBytes>
__global__ void __launch_bounds__(Policy::kThreads, Policy::kNormBlocks)
    norm_kernel(const Work work, const __grid_constant__ Packet<kBytes> packet, const bool reads, float* partials,
                const Scaling scaling, float* outcome, int64_t* skips) {
  const Counts counts(work);
  if (reads) sum_squares(work, packet, partials);
  packet.deliver(work);
  counts.copy(work);
  if (!is_last_block(work.ticket)) return;
  const double sum = scaling.takes_norm ? sum_partials_in_block<4>(partials, work.pieces) : 0.0;
  if (threadIdx.x == 0) finish_norm(scaling, sum, outcome, skips);
}

// squares[s]: the sum of partials[bounds[s]] up to partials[bounds[s + 1]]; a thread block for each.
__global__ void __launch_bounds__(Policy::kThreads)
    segment_norms_kernel(const float* partials, const int64_t* bounds, const int64_t segments, double* squares) {
  for (int64_t s = blockIdx.x; s < segments; s += gridDim.x) {
    const double sum = sum_partials_in_block<4>(partials + bounds[s], bounds[s + 1] - bounds[s]);
    if (threadIdx.x == 0) squares[s] = sum;
    __syncthreads();  // the next sum uses the same lanes
  }
}

}  // namespace accumfused::AF_TARGET
