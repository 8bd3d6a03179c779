// How numbers are stored in fewer bits, and the noise that rounds them; CPU and CUDA include this file. The
// counterpart, with the reasons, is accumfused/formats/codecs.py.
#pragma once
#include "numeric.h"
#include "rows.h"

namespace accumfused::AF_TARGET {

constexpr int kCodeShift = 19;  // of the 23 bits of a mantissa, codes keep 4
constexpr uint32_t kSignedBase = 120u << 23, kUnsignedBase = 112u << 23;
constexpr uint32_t kHeadroom = 2u << kCodeShift;

AF_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
AF_INLINE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

// The bits of `a` where the mask has ones, those of `b` elsewhere.
AF_INLINE uint32_t select(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }

// The bits; every NaN has those of one NaN, because adding to the bits of some makes other numbers.
AF_INLINE uint32_t bits_or_nan(float value) { return value != value ? kNan : bits_of(value); }

// ---- noise ----------------------------------------------------------------------------------------------------------

// SplitMix64's output function.
AF_INLINE uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// The product of the lower halves.
AF_INLINE uint64_t low_product(uint64_t a, uint64_t b) {
#if defined(__CUDA_ARCH__)
  uint64_t product;  // the compiler adds the upper halves' products besides, which are 0
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(uint32_t(a)), "r"(uint32_t(b)));
  return product;
#else
  return uint64_t(uint32_t(a)) * uint32_t(b);
#endif
}

// 32 bits for each element of a chunk: one hash of (seed, step, row) and the index of a pair of neighbours in the whole
// tensor has both elements' bits; a row may be a part of that. Each 2^32 elements have another key. A part's chunk
// across such a boundary keeps the key of its first element, so beyond 4G elements a few may get other bits than in the
// whole.
struct Noise {
  static constexpr uint64_t kStride = 0x4e3779b1u;  // between the positions of pairs
  static constexpr uint64_t kFactor = 0xffff3a4du;  // near 2^32: the product's upper half has nearly every value
  uint64_t first;                                   // the position of the chunk's first pair
  uint32_t odd;                                     // 1: the chunk begins with the second element of a pair

  // `offset`: where in its row the chunk begins.
  AF_METHOD Noise(const Row& row, int64_t index, int64_t step, int64_t offset) {
    const uint64_t seed = row.seed ? uint64_t(*row.seed) : 0;
    *this = Noise(mix(mix(mix(seed) ^ uint64_t(step)) ^ uint64_t(index)), row.origin + offset);
  }
  // `begin`: where in the whole tensor the chunk begins.
  AF_METHOD Noise(uint64_t key, int64_t begin) {
    const uint64_t start = uint64_t(begin);
    first = mix(key ^ (start >> 32)) + low_product(start >> 1 & 0x7fffffffu, kStride), odd = uint32_t(start & 1);
  }

  AF_METHOD uint64_t position(uint32_t pair) const { return first + low_product(pair, kStride); }

  // The bits of a pair, the first element's in the lower half, or of several; `low_product` is that of its words. Of
  // halves that know nothing of each other, products of some keys would resemble those of others.
  template <class Words, class Product>
  AF_METHOD static Words at(Words position, const Product& low_product) {
    const Words mixed = low_product(position, position ^ (position >> 32));
    return low_product(mixed ^ (mixed >> 32), Words{} + kFactor) + mixed;
  }
  AF_METHOD static uint64_t at(uint64_t position) { return at(position, low_product); }
};

constexpr int kWeightStream = 2;  // a state's is its number, the third's that of the second
constexpr int kTurns[] = {0, 16, 24};

// An element's noise for one of its numbers: the same bits, turned.
template <int kNumber>
AF_INLINE uint32_t stream(uint32_t noise) {
  constexpr int kTurn = kTurns[kNumber];
  if constexpr (kTurn == 0) return noise;
  else return (noise << kTurn) | (noise >> (32 - kTurn));
}

// ---- 16 bits --------------------------------------------------------------------------------------------------------

AF_INLINE Bfloat16 to_bfloat16(float value, uint32_t noise) {
  return {uint16_t((bits_or_nan(value) + (noise >> 16)) >> 16)};
}

// The nearest; ties go to even.
AF_INLINE Bfloat16 to_bfloat16(float value) {
  const uint32_t bits = bits_or_nan(value);
  return {uint16_t((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
}

// The key of the noise of a chunk of a sum, from its word: see Fold.
AF_INLINE uint64_t fold_key(uint64_t word, uint64_t salt) { return mix(word ^ salt); }

// Below 2^-14 the distance between neighbours stays 2^-24, so more bits of the mantissa are dropped there, at most 30.
// Ties go to even: one less than half a unit is added first, and the bit that is to be the last one.
AF_INLINE Float16 to_float16(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return {half};
#else
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu, exponent = magnitude >> 23;
  const uint32_t below = exponent < 113 ? 113 - exponent : 0;
  const uint32_t beyond = below > 17 ? smaller(below - 17, 31) : 0;  // bits that cannot decide any more
  const uint32_t dropped = smaller(13 + below, 30);
  const uint32_t mantissa = ((magnitude & 0x7fffffu) | 0x800000u) >> beyond;
  const uint32_t up = ((1u << dropped) >> 1) - 1 + (mantissa >> dropped & 1);
  const uint32_t half = ((exponent > 113 ? exponent - 113 : 0) << 10) + ((mantissa + up) >> dropped);
  const uint32_t kept = magnitude > 0x7f800000u ? 0x7e00u : smaller(half, 0x7c00u);
  return {uint16_t(kept | (bits >> 16 & 0x8000u))};
#endif
}

// ---- weights --------------------------------------------------------------------------------------------------------
// Each form has two streams: the parameter, and the rest of its fp32 value (none: void).

struct Float32Weights {
  using Param = float;
  using Master = void;
  AF_METHOD static float join(float param) { return param; }
  AF_METHOD static float store(float value, uint32_t) { return value; }
};

struct StochasticWeights {
  using Param = Bfloat16;
  using Master = void;
  AF_METHOD static float join(Bfloat16 param) { return to_float(param); }
  AF_METHOD static Bfloat16 store(float value, uint32_t noise) { return to_bfloat16(value, noise); }
};

// The fp32 value of a parameter and its remainder. A number that was split gives a NaN only if its half is one. Any
// other NaN says that somebody has written the parameter (a zero beside a negative remainder, say): it counts as it is.
AF_INLINE float joined(Bfloat16 param, int32_t remainder) {
  const float value = float_from_bits((uint32_t(param.bits) << 16) + uint32_t(remainder));
  return value != value ? to_float(param) : value;
}

struct Split16Weights {
  using Param = Bfloat16;
  using Master = int16_t;
  AF_METHOD static float join(Bfloat16 param, int16_t remainder) { return joined(param, remainder); }
  AF_METHOD static void store(float value, uint32_t, Bfloat16& param, int16_t& remainder) {
    const uint32_t bits = bits_or_nan(value);
    param.bits = uint16_t((bits + 0x8000u) >> 16), remainder = int16_t(bits);
  }
};

struct Split8Weights {
  using Param = Bfloat16;
  using Master = int8_t;
  AF_METHOD static float join(Bfloat16 param, int8_t remainder) { return joined(param, int32_t(remainder) * 256); }
  AF_METHOD static void store(float value, uint32_t noise, Bfloat16& param, int8_t& remainder) {
    const uint32_t bits = bits_or_nan(value) + (noise >> 24);
    param.bits = uint16_t((bits + 0x8000u) >> 16), remainder = int8_t(bits >> 8);
  }
};

// A master that is not rounded to its parameter is out of date: somebody has written the parameter, which counts.
struct MasterWeights {
  using Param = Float16;
  using Master = float;
  AF_METHOD static float join(Float16 param, float master) {
    return to_float16(master).bits == param.bits ? master : to_float(param);
  }
  AF_METHOD static void store(float value, uint32_t, Float16& param, float& master) {
    param = to_float16(value), master = value;
  }
};

// In the order of enum Weights.
#define AF_WEIGHTS(X) X(Float32Weights) X(StochasticWeights) X(Split16Weights) X(Split8Weights) X(MasterWeights)

// ---- quantisation blocks of 8 bits ----------------------------------------------------------------------------------

// The biased exponent of a quantisation block's scale, from the bits of its largest magnitude.
AF_INLINE uint32_t scale_of(uint32_t largest) {
  const uint32_t exponent = (largest + kHeadroom) >> 23;
  return exponent >= 254 ? 255 : exponent < uint32_t(kSmallestScale) ? 0 : exponent;
}

AF_INLINE float scale_factor(uint32_t exponent) { return float_from_bits(exponent == 255 ? kNan : exponent << 23); }

AF_INLINE float inverse_scale(uint32_t exponent) {
  return float_from_bits(exponent == 255 ? 0 : (254 - exponent) << 23);
}

// The code in the lowest 8 bits; the bits above mean nothing.
template <bool kSecondMoment>
AF_INLINE uint32_t encode(float value, float inverse, uint32_t noise) {
  constexpr uint32_t kBase = kSecondMoment ? kUnsignedBase : kSignedBase;
  const uint32_t bits = bits_of(fabsf(value) * inverse + float_from_bits(kBase)) + (noise >> 16 << (kCodeShift - 16));
  if constexpr (kSecondMoment) return larger((bits - kBase) >> kCodeShift, kMinSecondMoment);
  else return select(0x7f, bits >> kCodeShift, bits_of(value) >> 24);
}

// The value of a code with nothing above its 8 bits.
template <bool kSecondMoment>
AF_INLINE float decode(uint32_t code, float factor) {
  constexpr uint32_t kBase = kSecondMoment ? kUnsignedBase : kSignedBase;
  constexpr uint32_t kMask = kSecondMoment ? 0xff : 0x7f;
  const uint32_t bits = select(kMask << kCodeShift, code << kCodeShift, kBase);
  const float value = (float_from_bits(bits) - float_from_bits(kBase)) * factor;
  if constexpr (kSecondMoment) return value;
  else return float_from_bits(select(0x80000000, code << 24, bits_of(value)));
}

}  // namespace accumfused::AF_TARGET
