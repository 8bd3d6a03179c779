// The common work of a thread block: summing 1024 lanes, and finding out that it is the last thread block.
#pragma once
#include "../numeric.h"
#include "policy.h"

namespace accumfused::AF_TARGET {

// Sums a thread block's lanes by halving, 1024 -> 512 -> ... -> 1, and writes the result.
// place: the first of this thread's lanes is 4 times that.
__device__ inline void store_sum(const float (&lanes)[kWidth], float* to, int place = int(threadIdx.x)) {
  __shared__ float4 all[Policy::kThreads];
  __syncthreads();  // of the chunk before, the first warp may still be reading
  all[place] = {lanes[0], lanes[1], lanes[2], lanes[3]};
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const auto add = [](float4 a, float4 b) { return float4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; };
  float4 part[Policy::kThreads / kWarp];  // of threads t, t + 32, ...
#pragma unroll
  for (int k = 0; k < Policy::kThreads / kWarp; ++k) part[k] = all[threadIdx.x + k * kWarp];
#pragma unroll
  for (int half = Policy::kThreads / kWarp / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) part[k] = add(part[k], part[k + half]);
  }
  float4 sum = part[0];
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) {
    const float4 other = {__shfl_down_sync(0xffffffffu, sum.x, half), __shfl_down_sync(0xffffffffu, sum.y, half),
                          __shfl_down_sync(0xffffffffu, sum.z, half), __shfl_down_sync(0xffffffffu, sum.w, half)};
    sum = add(sum, other);
  }
  if (threadIdx.x == 0) *to = (sum.x + sum.z) + (sum.y + sum.w);
}

// norm.h's sum_partials by one thread block; the result is thread 0's. kLoads: in flight for each of its lanes.
template <int kLoads>
__device__ double sum_partials_in_block(const float* partials, int64_t chunks) {
  __shared__ double lanes[kLanes];
  double sums[kWidth] = {};  // of lanes t, t + 256, ...
#pragma unroll kLoads
  for (int64_t c = threadIdx.x; c < chunks; c += kLanes) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (c + k * Policy::kThreads < chunks) sums[k] += double(__ldcg(partials + c + k * Policy::kThreads));
    }
  }
  for (int k = 0; k < kWidth; ++k) lanes[threadIdx.x + k * Policy::kThreads] = sums[k];
  int half = int(kLanes) / 2;
  while (half > 0 && half >= chunks) half /= 2;  // levels that would add 0 alone: norm.h leaves them out, too
#pragma unroll 1
  for (; half > 0; half /= 2) {
    if (half < Policy::kThreads) __syncthreads();  // before, each thread adds what it has written
#pragma unroll 1
    for (int lane = int(threadIdx.x); lane < half; lane += Policy::kThreads) lanes[lane] += lanes[lane + half];
  }
  __syncthreads();  // the compiler may let all threads load what one of them has just written
  return lanes[0];
}

// ---- all blocks -----------------------------------------------------------------------------------------------------

// Whether all other thread blocks have done their work; this one then sees it. The ticket is as before the launch.
__device__ inline bool is_last_block(uint32_t* ticket) {
  __shared__ bool last;
  __syncthreads();
  if (gridDim.x == 1) return true;  // the barrier is enough for one block: no fence, no way to the L2 cache
  if (threadIdx.x == 0) {
    __threadfence();                                           // releases the whole thread block's writes
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;  // wraps to 0 by itself
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace accumfused::AF_TARGET
