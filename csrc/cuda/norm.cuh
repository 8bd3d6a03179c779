// Norm: each chunk's sum of squares; the last thread block makes the coefficient of them, or in a step each thread
// block for itself. It copies the step counts besides. And sums of runs of chunks.
#pragma once
#include "../norm.h"
#include "block.cuh"
#include "counts.cuh"
#include "formats.cuh"

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
    for_each_row<Policy::kNormRows>(at.n, aligned, [&](auto access, int i) {
      float g[access.kCount][kWidth];
      access.load(grad, i, at.n, g);
      add_squares(g, lanes);
    });
  });
}

// The same with little code, which each rule has a copy of: several rows at a time of fp32 gradients alone.
__device__ inline void measure_chunk_briefly(const Piece& at, float (&lanes)[kWidth]) {
  const bool is_float = at.in.grad_dtype == Dtype::kFloat32;
  const auto add_rows = [&](auto access, int i) {
    float g[access.kCount][kWidth];
    access.load(stream_at<const float>(at.in.grad, at), i, at.n, g);
    add_squares(g, lanes);
  };
  const int done = for_each_whole_row<Policy::kNormRows>(at.n, is_float && is_aligned(at.in.grad, 4), add_rows);
#pragma unroll 1
  for (int i = done + int(threadIdx.x) * kWidth; i < at.n; i += int(kLanes)) {
    const Raw<4> raw(at, at.in.grad, is_float ? 4 : 2, i);
    float g[1][kWidth];
    if (is_float) raw.to_floats<float>(g[0]);
    else if (at.in.grad_dtype == Dtype::kFloat16) raw.to_floats<Float16>(g[0]);
    else raw.to_floats<Bfloat16>(g[0]);
    add_squares(g, lanes);
  }
}

// partials[chunk]: the sum of squares of each chunk that has a gradient.
template <class Measure>
__device__ void sum_squares(const Work& work, float* partials, const Measure& measure) {
  for (int chunk = int(blockIdx.x); chunk < work.pieces; chunk += int(gridDim.x)) {
    const Piece at = piece_of(work, chunk);
    if (at.in.grad == nullptr) continue;
    float lanes[kWidth] = {};
    measure(at, lanes);
    store_sum(lanes, partials + chunk);
  }
}

// `reads`: there are gradients whose sums of squares are missing from partials.
__global__ void __launch_bounds__(Policy::kThreads, Policy::kNormBlocks)
    norm_kernel(const Work work, const bool reads, float* partials, const Scaling scaling, float* outcome,
                int64_t* skips) {
  wait_for_launches_in_front();
  let_next_launch_begin();
  if (reads) sum_squares(work, partials, measure_chunk);
  copy_counts(work);
  if (!is_last_block(work.ticket)) return;
  const double sum = scaling.takes_norm ? sum_partials_in_block<4>(partials, work.pieces) : 0.0;
  if (threadIdx.x == 0) finish_norm(scaling, sum, outcome, skips);
}

// A norm that a step takes itself.
struct Norm {
  int chunks;  // over all rows
  bool reads;  // as above; it then reads all gradients
  float* partials;
  Scaling scaling;
  float* outcome;  // null: there is one already
  int64_t* skips;
};

// The thread blocks run at once. Each computes the outcome for itself, in shared memory; the first one writes it down.
__device__ inline void take_norm(const Work& units, const Norm& norm, float* outcome) {
  Work chunks = units;
  chunks.pieces = norm.chunks, chunks.size = int(kChunk);
  if (norm.reads) sum_squares(chunks, norm.partials, measure_chunk_briefly);
  copy_counts(chunks);
  wait_for_grid(chunks.ticket);
  const double sum = norm.scaling.takes_norm ? sum_partials_in_block<1>(norm.partials, norm.chunks) : 0.0;
  if (threadIdx.x == 0) {
    const bool is_first = blockIdx.x == 0;
    finish_norm(norm.scaling, sum, outcome, is_first ? norm.skips : nullptr);
    for (int k = 0; k < 3 && is_first; ++k) norm.outcome[k] = outcome[k];
  }
  __syncthreads();
}

// squares[s]: the sum of partials[bounds[s]] up to partials[bounds[s + 1]]; a thread block for each.
__global__ void __launch_bounds__(Policy::kThreads)
    segment_norms_kernel(const float* partials, const int64_t* bounds, const int64_t segments, double* squares) {
  wait_for_launches_in_front();
  for (int64_t s = blockIdx.x; s < segments; s += gridDim.x) {
    const double sum = sum_partials_in_block<4>(partials + bounds[s], bounds[s + 1] - bounds[s]);
    if (threadIdx.x == 0) squares[s] = sum;
    __syncthreads();  // the next sum uses the same lanes
  }
}

}  // namespace accumfused::AF_TARGET
