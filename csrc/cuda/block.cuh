// What a block of 256 threads does together: reads and writes rows of a chunk, sums 1024 lanes, finds out that it is
// the last one. Each thread owns 4 neighbouring lanes, so a row of 1024 elements is one 16-byte access per thread and
// stream.
#pragma once
#include <type_traits>

#include "../numeric.h"
#include "../rows.h"

namespace accumfused::AF_TARGET {

constexpr int kWidth = 4;
constexpr int kThreads = int(kLanes) / kWidth;
constexpr int kWarp = 32;

// One chunk, the same for all threads of the block.
struct Chunk {
  const Row& row;
  const Operands& in;
  int64_t index;  // of the row
  int64_t offset;
  int n;
};

// ---- memory ---------------------------------------------------------------------------------------------------------

__device__ inline bool is_aligned(const void* address, int elements_bytes) {
  return reinterpret_cast<uintptr_t>(address) % (kWidth * elements_bytes) == 0;
}

// A pointer that was read from memory is one to global memory: without being told, the compiler emits generic accesses.
template <class T>
__device__ T* global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// An unsigned number of so many bytes.
template <int kBytes>
using Bits =
    std::conditional_t<(kBytes > 4), std::conditional_t<kBytes == 16, unsigned __int128, uint64_t>,
                       std::conditional_t<kBytes == 4, uint32_t, std::conditional_t<kBytes == 2, uint16_t, uint8_t>>>;

// Four neighbouring elements of 1, 2 or 4 bytes.
template <class T>
struct alignas(kWidth * sizeof(T)) Four {
  T each[kWidth];
};

// Elements i .. i + 3, as one number: an access to a vector's elements the compiler may split.
// kWhole: they all exist, and lie on a boundary of 4 elements. Otherwise those from n on read as 0 and are not written,
// and a stream that is off its boundary goes element by element. kFrugal: with fewer registers, so all streams do.
template <bool kWhole, bool kFrugal = false, class T>
__device__ Four<T> load_four(const T* from, int i, int n) {
  Four<T> four = {};
  if constexpr (!kWhole) {
    if (kFrugal || i + kWidth > n || !is_aligned(from, sizeof(T))) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (i + k < n) four.each[k] = from[i + k];
      }
      return four;
    }
  }
  const auto bits = *reinterpret_cast<const Bits<sizeof four>*>(from + i);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const auto word = Bits<sizeof(T)>(bits >> 8 * sizeof(T) * k);
    memcpy(&four.each[k], &word, sizeof word);
  }
  return four;
}

template <bool kWhole, bool kFrugal = false, class T>
__device__ void store_four(T* to, int i, int n, const Four<T>& four) {
  if constexpr (!kWhole) {
    if (kFrugal || i + kWidth > n || !is_aligned(to, sizeof(T))) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (i + k < n) to[i + k] = four.each[k];
      }
      return;
    }
  }
  Bits<sizeof four> bits = 0;
  if constexpr (kWhole && !kFrugal && sizeof(T) == 4) {
    memcpy(&bits, &four, sizeof bits);
  } else {  // copying would take more registers, or go through local memory
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      Bits<sizeof(T)> word;
      memcpy(&word, &four.each[k], sizeof word);
      bits |= decltype(bits)(word) << 8 * sizeof word * k;
    }
  }
  *reinterpret_cast<decltype(bits)*>(to + i) = bits;
}

// The same of kRows successive rows, as fp32 numbers.
template <bool kWhole, int kRows, bool kFrugal>
struct Access {
  static constexpr int kCount = kRows;

  template <class T>
  __device__ static void load(const T* from, int i, int n, float (&to)[kRows][kWidth]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Four<T> four = load_four<kWhole, kFrugal>(from + r * kLanes, i, n);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) to[r][k] = to_float(four.each[k]);
    }
  }

  __device__ static void store(float* to, int i, int n, const float (&from)[kRows][kWidth]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Four<float> four;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) four.each[k] = from[r][k];
      store_four<kWhole, kFrugal>(to + r * kLanes, i, n, four);
    }
  }
};

// Calls body(access, i) for every whole row of a chunk of n elements, kRows at a time while they last, so that several
// accesses are in flight; only if all streams lie on boundaries. How many elements that were.
template <int kRows, bool kFrugal = false, class Body>
__device__ int for_each_whole_row(int n, bool aligned, const Body& body) {
  constexpr int kRow = int(kLanes);
  if (!aligned) return 0;
  const int batched = n / (kRows * kRow) * (kRows * kRow), whole = n / kRow * kRow;
  int i = int(threadIdx.x) * kWidth;
#pragma unroll 1
  for (; i < batched; i += kRows * kRow) body(Access<true, kRows, kFrugal>(), i);
  if constexpr (kRows > 1) {
#pragma unroll 1
    for (; i < whole; i += kRow) body(Access<true, 1, kFrugal>(), i);
  }
  return whole;
}

// The same for every row.
template <int kRows, bool kFrugal = false, class Body>
__device__ void for_each_row(int n, bool aligned, const Body& body) {
  int i = for_each_whole_row<kRows, kFrugal>(n, aligned, body) + int(threadIdx.x) * kWidth;
#pragma unroll 1
  for (; i < n; i += int(kLanes)) body(Access<false, 1, kFrugal>(), i);
}

// Calls body with a pointer of the type of that index among Types.
template <class Type, class... Others, class Body>
__device__ void with_type(int index, const Body& body) {
  if constexpr (sizeof...(Others) == 0) {
    body(static_cast<const Type*>(nullptr));
  } else {
    if (index == 0) body(static_cast<const Type*>(nullptr));
    else with_type<Others...>(index - 1, body);
  }
}

// Calls body(grad + offset, whether vector accesses may be used) with the gradient's type.
template <class Body>
__device__ void with_grad(const Operands& in, int64_t offset, const Body& body) {
  if (in.grad_dtype == Dtype::kFloat32) {
    body(global(static_cast<const float*>(in.grad) + offset), is_aligned(in.grad, 4));
  } else if (in.grad_dtype == Dtype::kFloat16) {
    body(global(static_cast<const Float16*>(in.grad) + offset), is_aligned(in.grad, 2));
  } else {
    body(global(static_cast<const Bfloat16*>(in.grad) + offset), is_aligned(in.grad, 2));
  }
}

// ---- sums -----------------------------------------------------------------------------------------------------------

// Sums the block's lanes by halving, 1024 -> 512 -> ... -> 1, and writes the result.
__device__ inline void store_sum(const float (&lanes)[kWidth], float* to) {
  __shared__ float4 all[kThreads];
  __syncthreads();  // of the chunk before, the first warp may still be reading
  all[threadIdx.x] = {lanes[0], lanes[1], lanes[2], lanes[3]};
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  const auto add = [](float4 a, float4 b) { return float4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; };
  float4 part[kThreads / kWarp];  // of threads t, t + 32, ...
#pragma unroll
  for (int k = 0; k < kThreads / kWarp; ++k) part[k] = all[threadIdx.x + k * kWarp];
#pragma unroll
  for (int half = kThreads / kWarp / 2; half > 0; half /= 2) {
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

// norm.h's sum_partials by one block; the result is thread 0's.
__device__ inline double sum_partials_in_block(const float* partials, int64_t chunks) {
  __shared__ double lanes[kLanes];
  double sums[kWidth] = {};  // of lanes t, t + 256, ...
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < chunks; c += kLanes) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      if (c + k * kThreads < chunks) sums[k] += double(__ldcg(partials + c + k * kThreads));
    }
  }
  for (int k = 0; k < kWidth; ++k) lanes[threadIdx.x + k * kThreads] = sums[k];
  for (int half = int(kLanes) / 2; half > 0; half /= 2) {
    if (half < kThreads) __syncthreads();  // before, each thread adds what it has written
    for (int lane = int(threadIdx.x); lane < half; lane += kThreads) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];  // written by the thread that reads it
}

// ---- the last block -------------------------------------------------------------------------------------------------

// Whether all other blocks have done their work, which this block then sees. Leaves the ticket as it was before the
// launch.
__device__ inline bool is_last_block(uint32_t* ticket) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();                                           // releases what the whole block has written
    last = atomicInc(ticket, gridDim.x - 1) == gridDim.x - 1;  // wraps to 0 by itself
    __threadfence();
  }
  __syncthreads();
  return last;
}

}  // namespace accumfused::AF_TARGET
