// Reads and writes rows of a chunk: a thread has 4 neighbouring lanes, so a row of 1024 elements is one 16-byte access
// for each thread and stream.
#pragma once
#include <type_traits>

#include "../codecs.h"
#include "policy.h"

namespace accumfused::AF_TARGET {

__device__ inline bool is_aligned(const void* address, int elements_bytes) {
  return reinterpret_cast<uintptr_t>(address) % (kWidth * elements_bytes) == 0;
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
// and a stream that is off its boundary goes element by element.
template <bool kWhole, class T>
__device__ Four<T> load_four(const T* from, int i, int n) {
  Four<T> four = {};
  if constexpr (!kWhole) {
    if (i + kWidth > n || !is_aligned(from, sizeof(T))) {
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

template <bool kWhole, class T>
__device__ void store_four(T* to, int i, int n, const Four<T>& four) {
  if constexpr (!kWhole) {
    if (i + kWidth > n || !is_aligned(to, sizeof(T))) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if (i + k < n) to[i + k] = four.each[k];
      }
      return;
    }
  }
  Bits<sizeof four> bits = 0;
  if constexpr (kWhole && sizeof(T) == 4) {
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

// Noise of neighbouring elements, from a pair's position on: of both its elements, or of the second only.
__device__ inline void draw(uint64_t position, bool odd, uint32_t (&bits)[kWidth]) {
#pragma unroll
  for (int k = 0; k < kWidth; k += 2) {
    const uint64_t pair = Noise::at(position + k / 2 * Noise::kStride);
    bits[k] = uint32_t(pair), bits[k + 1] = uint32_t(pair >> 32);
  }
  if (odd) {
#pragma unroll
    for (int k = 0; k + 1 < kWidth; ++k) bits[k] = bits[k + 1];
    bits[kWidth - 1] = uint32_t(Noise::at(position + kWidth / 2 * Noise::kStride));
  }
}

// The same of kRows successive rows, as fp32 numbers. Of more than one only whole ones are stored.
template <bool kWhole, int kRows>
struct Access {
  static constexpr int kCount = kRows;

  template <class T>
  __device__ static void load(const T* from, int i, int n, float (&to)[kRows][kWidth]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Four<T> four = load_four<kWhole>(from + r * kLanes, i, n - r * int(kLanes));
#pragma unroll
      for (int k = 0; k < kWidth; ++k) to[r][k] = to_float(four.each[k]);
    }
  }

  // Numbers of bf16 are stored as such, without a rounding.
  template <class T>
  __device__ static void store(T* to, int i, int n, const float (&from)[kRows][kWidth]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Four<T> four;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        if constexpr (sizeof(T) == sizeof(float)) four.each[k] = from[r][k];
        else four.each[k] = {uint16_t(bits_of(from[r][k]) >> 16)};
      }
      store_four<kWhole>(to + r * kLanes, i, n, four);
    }
  }
};

// Calls body(access, i) for every whole row of a chunk of n elements, kRows at a time while they last, so that several
// accesses are in flight; only if all streams lie on boundaries. How many elements that were.
template <int kRows, class Body>
__device__ int for_each_whole_row(int n, bool aligned, const Body& body, int i = int(threadIdx.x) * kWidth) {
  constexpr int kRow = int(kLanes);
  if (!aligned) return 0;
  const int batched = n / (kRows * kRow) * (kRows * kRow), whole = n / kRow * kRow;
#pragma unroll 1
  for (; i < batched; i += kRows * kRow) body(Access<true, kRows>(), i);
  if constexpr (kRows > 1) {
#pragma unroll 1
    for (; i < whole; i += kRow) body(Access<true, 1>(), i);
  }
  return whole;
}

// The same for every row.
template <int kRows, class Body>
__device__ void for_each_row(int n, bool aligned, const Body& body, int first = int(threadIdx.x) * kWidth) {
  int i = for_each_whole_row<kRows>(n, aligned, body, first) + first;
#pragma unroll 1
  for (; i < n; i += int(kLanes)) body(Access<false, 1>(), i);
}

}  // namespace accumfused::AF_TARGET
