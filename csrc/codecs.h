// How numbers are stored in fewer bits, and the noise that rounds them; CPU and CUDA include this file. The
// counterpart, with the reasons, is accumfused/formats/codecs.py.
//
// F and U are float and uint32_t, or vectors of them (cpu/vector.h).
#pragma once
#include "numeric.h"
#include "rows.h"

namespace accumfused::AF_TARGET {

constexpr uint32_t kNan = 0x7fc00000;
constexpr int kCodeShift = 19;  // of the 23 bits of a mantissa, codes keep 4
constexpr uint32_t kSignedBase = 120u << 23, kUnsignedBase = 112u << 23;
constexpr uint32_t kHeadroom = 2u << kCodeShift;

AF_INLINE float magnitude(float value) { return fabsf(value); }
AF_INLINE uint32_t larger(uint32_t a, uint32_t b) { return a > b ? a : b; }
AF_INLINE uint32_t select(uint32_t mask, uint32_t a, uint32_t b) { return (a & mask) | (b & ~mask); }
AF_INLINE uint32_t exclusive_or(uint32_t a, uint32_t b, uint32_t c) { return a ^ b ^ c; }

// The bits, of every NaN those of one: adding to those of some makes other numbers.
template <class F>
AF_INLINE auto bits_or_nan(F value) {
  return value != value ? bits_of(value) * 0 + kNan : bits_of(value);
}

// ---- noise ----------------------------------------------------------------------------------------------------------

// SplitMix64's output function.
AF_INLINE uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15u;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9u;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebu;
  return value ^ (value >> 31);
}

// 32 bits for each element of a chunk: a hash of (seed, step, row) and the element's index in the whole tensor,
// of which a row may be a part. Each 2^32 elements have another key; a chunk of a part that lies across such a boundary
// keeps the one of its first element, so only beyond 4G elements may a few get other bits than in the whole.
struct Noise {
  static constexpr uint32_t kStride = 0x9e3779b1u;  // between the positions of neighbours
  uint32_t first, second;

  // `offset`: where in its row the chunk begins.
  AF_METHOD Noise(const Row& row, int64_t index, int64_t step, int64_t offset) {
    const uint64_t seed = row.seed ? uint64_t(*row.seed) : 0;
    const uint64_t key = mix(mix(mix(seed) ^ uint64_t(step)) ^ uint64_t(index));
    const uint64_t start = uint64_t(row.origin + offset), keys = mix(key ^ (start >> 32));
    first = uint32_t(keys) + uint32_t(start) * kStride, second = uint32_t(keys >> 32);
  }

  template <class U>
  AF_METHOD U position(U element) const {
    return element * kStride + first;
  }
  template <class U>
  AF_METHOD U at(U position) const {
    U x = (position ^ (position >> 16)) * 0x21f0aaadu;
    x = exclusive_or(x, x >> 15, x * 0 + second) * 0x735a2d97u;
    return x ^ (x >> 15);
  }
  AF_METHOD uint32_t operator()(uint32_t element) const { return at(position(element)); }
};

template <int kNumber, class U>
AF_INLINE U stream(U noise) {
  constexpr int kTurn = 11 * kNumber;
  if constexpr (kTurn == 0) return noise;
  else return (noise << kTurn) | (noise >> (32 - kTurn));
}

// Its first bits.
template <int kNumber, int kBits, class U>
AF_INLINE U leading(U noise) {
  constexpr int kBelow = 32 - kBits - 11 * kNumber;
  if constexpr (kBelow < 0 || kNumber == 0) return stream<kNumber>(noise) >> (32 - kBits);
  else return (noise >> kBelow) & ((1u << kBits) - 1);
}

constexpr int kWeightStream = 2;  // a state's is its number, the third's that of the second

// ---- 16 bits --------------------------------------------------------------------------------------------------------

AF_INLINE Bfloat16 to_bfloat16(float value) {
  const uint32_t bits = bits_or_nan(value);
  return {uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <class F, class U>
AF_INLINE U bfloat16_bits(F value, U noise) {
  return (bits_or_nan(value) + (noise >> 16)) >> 16;
}

AF_INLINE Bfloat16 to_bfloat16(float value, uint32_t noise) { return {uint16_t(bfloat16_bits(value, noise))}; }

AF_INLINE uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Below 2^-14 the distance between neighbours stays 2^-24, so more bits of the mantissa are dropped there: at most 30,
// of which `up(dropped, mantissa)` says what is added to them.
template <class Up>
AF_INLINE Float16 round_to_float16(float value, const Up& up) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu, exponent = magnitude >> 23;
  const uint32_t below = exponent < 113 ? 113 - exponent : 0;
  const uint32_t beyond = below > 17 ? smaller(below - 17, 31) : 0;  // what 30 bits cannot decide about
  const uint32_t dropped = smaller(13 + below, 30);
  const uint32_t mantissa = ((magnitude & 0x7fffffu) | 0x800000u) >> beyond;
  const uint32_t half = ((exponent > 113 ? exponent - 113 : 0) << 10) + ((mantissa + up(dropped, mantissa)) >> dropped);
  const uint32_t kept = magnitude > 0x7f800000u ? 0x7e00u : smaller(half, 0x7c00u);
  return {uint16_t(kept | (bits >> 16 & 0x8000u))};
}

AF_INLINE Float16 to_float16(float value, uint32_t noise) {
  return round_to_float16(value, [=](uint32_t dropped, uint32_t) { return noise >> (32 - dropped); });
}

AF_INLINE Float16 to_float16(float value) {
#if defined(__CUDA_ARCH__)
  uint16_t half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
  return {half};
#else
  // Ties to even: one less than half a unit, and the bit that is to be the last one.
  return round_to_float16(value, [](uint32_t dropped, uint32_t mantissa) {
    return ((1u << dropped) >> 1) - 1 + (mantissa >> dropped & 1);
  });
#endif
}

// ---- weights --------------------------------------------------------------------------------------------------------
// Each form has two streams: the parameter's own type and that of what it lacks of its fp32 value (none: void).

struct Float32Weights {
  using Param = float;
  using Master = void;
  AF_METHOD static float join(float param) { return param; }
  AF_METHOD static float store(float value, uint32_t) { return value; }
};

template <bool kStochastic>
struct Bfloat16Weights {
  using Param = Bfloat16;
  using Master = void;
  AF_METHOD static float join(Bfloat16 param) { return to_float(param); }
  AF_METHOD static Bfloat16 store(float value, uint32_t noise) {
    return kStochastic ? to_bfloat16(value, noise) : to_bfloat16(value);
  }
};

template <bool kStochastic>
struct Float16Weights {
  using Param = Float16;
  using Master = void;
  AF_METHOD static float join(Float16 param) { return to_float(param); }
  AF_METHOD static Float16 store(float value, uint32_t noise) {
    return kStochastic ? to_float16(value, noise) : to_float16(value);
  }
};

// Of a parameter and what it lacks. No number that was split gives a NaN unless its half is one too, so where they make
// one the parameter was written from outside (a zero beside the old, negative remainder, say): it counts as it is.
AF_INLINE float joined(Bfloat16 param, int32_t remainder) {
  const float value = float_from_bits((uint32_t(param.bits) << 16) + uint32_t(remainder));
  return value != value ? to_float(param) : value;
}

struct Split16Weights {
  using Param = Bfloat16;
  using Master = int16_t;
  template <class F, class U>
  AF_METHOD static void to_bits(F value, U, U& param, U& remainder) {
    const U bits = bits_or_nan(value);
    param = (bits + 0x8000u) >> 16, remainder = bits;
  }

  AF_METHOD static float join(Bfloat16 param, int16_t remainder) { return joined(param, remainder); }
  AF_METHOD static void store(float value, uint32_t noise, Bfloat16& param, int16_t& remainder) {
    uint32_t high, low;
    to_bits(value, noise, high, low);
    param.bits = uint16_t(high), remainder = int16_t(low);
  }
};

struct Split8Weights {
  using Param = Bfloat16;
  using Master = int8_t;
  template <class F, class U>
  AF_METHOD static void to_bits(F value, U noise, U& param, U& remainder) {
    const U bits = bits_or_nan(value) + (noise >> 24);
    param = (bits + 0x8000u) >> 16, remainder = bits >> 8;
  }

  AF_METHOD static float join(Bfloat16 param, int8_t remainder) { return joined(param, int32_t(remainder) * 256); }
  AF_METHOD static void store(float value, uint32_t noise, Bfloat16& param, int8_t& remainder) {
    uint32_t high, low;
    to_bits(value, noise, high, low);
    param.bits = uint16_t(high), remainder = int8_t(low);
  }
};

// A master that is not rounded to its parameter is out of date: somebody has written the parameter, which counts.
template <class Half>
struct MasterWeights {
  using Param = Half;
  using Master = float;
  AF_METHOD static Half rounded(float value) {
    if constexpr (__is_same(Half, Bfloat16)) return to_bfloat16(value);
    else return to_float16(value);
  }
  AF_METHOD static float join(Half param, float master) {
    return rounded(master).bits == param.bits ? master : to_float(param);
  }
  AF_METHOD static void store(float value, uint32_t, Half& param, float& master) {
    param = rounded(value), master = value;
  }
};

// In the order of enum Weights.
#define AF_WEIGHTS(X)       \
  X(Float32Weights)         \
  X(Bfloat16Weights<false>) \
  X(Bfloat16Weights<true>)  \
  X(Float16Weights<false>)  \
  X(Float16Weights<true>)   \
  X(Split16Weights) X(Split8Weights) X(MasterWeights<Bfloat16>) X(MasterWeights<Float16>)

// ---- blocks of 8 bits -----------------------------------------------------------------------------------------------

// The biased exponent of a block's scale from the bits of its largest magnitude.
AF_INLINE uint32_t scale_of_exponent(uint32_t exponent) {
  return exponent >= 254 ? 255 : exponent < uint32_t(kSmallestScale) ? 0 : exponent;
}

AF_INLINE uint32_t scale_of(uint32_t largest) { return scale_of_exponent((largest + kHeadroom) >> 23); }

AF_INLINE float scale_factor(uint32_t exponent) { return float_from_bits(exponent == 255 ? kNan : exponent << 23); }

AF_INLINE float inverse_scale(uint32_t exponent) {
  return float_from_bits(exponent == 255 ? 0 : (254 - exponent) << 23);
}

// The code in the lowest 8 bits; those above are of no meaning.
template <bool kSecondMoment, class F, class U>
AF_INLINE U encode(F value, float inverse, U noise) {
  constexpr uint32_t kBase = kSecondMoment ? kUnsignedBase : kSignedBase;
  const U bits = bits_of(magnitude(value) * inverse + float_from_bits(kBase)) + (noise >> (32 - kCodeShift));
  if constexpr (kSecondMoment) {
    return larger((bits - kBase) >> kCodeShift, bits * 0 + uint32_t(kMinSecondMoment));
  } else {
    return select(bits * 0 + 0x7fu, bits >> kCodeShift, bits_of(value) >> 24);
  }
}

// Of a code with nothing above its 8 bits.
template <bool kSecondMoment, class U>
AF_INLINE auto decode(U code, float factor) {
  constexpr uint32_t kBase = kSecondMoment ? kUnsignedBase : kSignedBase;
  constexpr uint32_t kMask = kSecondMoment ? 0xffu : 0x7fu;
  const U bits = select(code * 0 + (kMask << kCodeShift), code << kCodeShift, code * 0 + kBase);
  const auto value = (float_from_bits(bits) - float_from_bits(kBase)) * factor;
  if constexpr (kSecondMoment) return value;
  else return float_from_bits(select(code * 0 + 0x80000000u, code << 24, bits_of(value)));
}

}  // namespace accumfused::AF_TARGET
