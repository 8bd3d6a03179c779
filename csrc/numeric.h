// Loads, rounding and flushing shared by every backend. One written order of IEEE fp32 operations; nothing here may be
// contracted into FMA (-ffp-contract=off, --fmad=false).
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "target.h"

namespace accumfused::AF_TARGET {

constexpr uint32_t kNan = 0x7fc00000;

struct Float16 {
  uint16_t bits;
};
struct Bfloat16 {
  uint16_t bits;
};

AF_INLINE float float_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

AF_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

template <class T>
AF_INLINE bool is_finite(T value) {
  return value - value == 0;
}

AF_INLINE float to_float(float value) { return value; }

AF_INLINE float to_float(Bfloat16 value) { return float_from_bits(uint32_t(value.bits) << 16); }

AF_INLINE float to_float(Float16 value) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(value.bits));
  return result;
#else
  // Moves the fields into place and lets one exact multiplication rebias the exponent, subnormals included.
  const uint32_t half = value.bits;
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  const uint32_t finite = bits_of(float_from_bits(magnitude) * 0x1p112f);
  const uint32_t rebiased = (half & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : finite;
  return float_from_bits(rebiased | ((half & 0x8000u) << 16));
#endif
}

// New states below the smallest normal number are stored as 0. Otherwise the moments of unused embedding rows sink into
// subnormals and the CPU slows sevenfold.
AF_INLINE float flush_subnormal(float value) { return fabsf(value) < 0x1p-126f ? 0.0f : value; }

// IEEE square root; vectorises with -fno-math-errno.
AF_INLINE float square_root(float value) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(value);
#else
  return __builtin_sqrtf(value);
#endif
}

AF_INLINE double square_root(double value) {
#if defined(__CUDA_ARCH__)
  return __dsqrt_rn(value);
#else
  return __builtin_sqrt(value);
#endif
}

AF_INLINE float absolute(float value) { return fabsf(value); }
AF_INLINE double absolute(double value) { return fabs(value); }

// A step count as a whole number, within what fp32 counts exactly.
AF_INLINE int64_t whole_steps(float count) { return count > 0 ? int64_t(count < 0x1p24f ? count : 0x1p24f) : 0; }

// base ** exponent by squaring, in double: the same bits wherever it runs, unlike pow().
AF_INLINE double power(double base, int64_t exponent) {
  double result = 1.0;
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

// As power() for the exponent's whole part, which is at most 2^24; roots for the digits behind the point.
AF_INLINE double real_power(double base, double exponent) {
  const double size = absolute(exponent);
  const int64_t whole = size < 0x1p24 ? int64_t(size) : int64_t(1) << 24;
  double result = power(base, whole), rest = size - double(whole);
  for (int bit = 0; bit < 53; ++bit) {
    base = square_root(base), rest += rest;
    result = rest >= 1 ? result * base : result, rest = rest >= 1 ? rest - 1 : rest;
  }
  result = exponent < 0 ? 1.0 / result : result;
  return exponent == exponent ? result : exponent;
}

}  // namespace accumfused::AF_TARGET
