// Two fp32 numbers at a time: from compute capability 10.0 on one instruction computes both.
#pragma once
#include "../numeric.h"

namespace accumfused::AF_TARGET {

// -0, which no compiler may know: memory that a host can write. A product plus this has the product's bits.
__constant__ float minus_zero = -0.0f;

struct Pair {
  float x, y;
};

__device__ inline Pair both(float value) { return {value, value}; }

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000 && __CUDA_ARCH__ < 1200  // of these, 12.0 makes two instructions
__device__ inline uint64_t bits_of(Pair pair) {
  uint64_t bits;
  asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "f"(pair.x), "f"(pair.y));
  return bits;
}

__device__ inline Pair pair_from_bits(uint64_t bits) {
  Pair pair;
  asm("mov.b64 {%0, %1}, %2;" : "=f"(pair.x), "=f"(pair.y) : "l"(bits));
  return pair;
}

__device__ inline Pair fused(Pair a, Pair b, Pair c) {
  uint64_t bits;
  asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(bits) : "l"(bits_of(a)), "l"(bits_of(b)), "l"(bits_of(c)));
  return pair_from_bits(bits);
}

__device__ inline Pair operator+(Pair a, Pair b) {
  uint64_t bits;
  asm("add.rn.f32x2 %0, %1, %2;" : "=l"(bits) : "l"(bits_of(a)), "l"(bits_of(b)));
  return pair_from_bits(bits);
}

// ptxas contracts `mul.rn.f32x2` with a sum behind it, in spite of .rn and --fmad=false.
__device__ inline Pair operator*(Pair a, Pair b) { return fused(a, b, both(minus_zero)); }
#else
__device__ inline Pair fused(Pair a, Pair b, Pair c) { return {__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y)}; }
__device__ inline Pair operator+(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }
__device__ inline Pair operator*(Pair a, Pair b) { return {a.x * b.x, a.y * b.y}; }
#endif

__device__ inline float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline Pair operator-(Pair a) { return {-a.x, -a.y}; }
__device__ inline Pair operator-(Pair a, Pair b) { return a + -b; }
__device__ inline Pair operator*(Pair a, float b) { return a * both(b); }
__device__ inline Pair operator+(Pair a, float b) { return a + both(b); }

}  // namespace accumfused::AF_TARGET
