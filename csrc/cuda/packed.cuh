// The formats of large models, several numbers at a time: bf16 parameters with their remainders, and quantisation
// blocks. The same bits as one by one in codecs.h.
#pragma once
#include "../codecs.h"
#include "pair.cuh"
#include "policy.h"

namespace accumfused::AF_TARGET {

constexpr int kQuantBlockThreads = int(kQuantBlock) / kEight;  // for one quantisation block

// ---- memory ---------------------------------------------------------------------------------------------------------

// The words of 8 elements, from a boundary of as many bytes, at most 16.
template <int kWords>
__device__ void load_words(const void* from, uint32_t (&to)[kWords]) {
  if constexpr (kWords == 2) {  // as one number: the compiler may split an access to a vector
    const uint64_t two = *static_cast<const uint64_t*>(from);
    to[0] = uint32_t(two), to[1] = uint32_t(two >> 32);
  } else {
#pragma unroll
    for (int w = 0; w < kWords; w += 4) {
      const uint4 four = static_cast<const uint4*>(from)[w / 4];
      to[w] = four.x, to[w + 1] = four.y, to[w + 2] = four.z, to[w + 3] = four.w;
    }
  }
}

template <int kWords>
__device__ void store_words(void* to, const uint32_t (&from)[kWords]) {
  if constexpr (kWords == 2) *static_cast<uint64_t*>(to) = from[0] | uint64_t(from[1]) << 32;
  else *static_cast<uint4*>(to) = {from[0], from[1], from[2], from[3]};
}

// ---- weights: a quad of elements, two words of bf16 -----------------------------------------------------------------

template <class W>
struct PackedWeights;

template <>
struct PackedWeights<StochasticWeights> {
  static constexpr int kMasterWords = 0;
  __device__ static void join(const uint32_t* param, const uint32_t*, float* p) {
    p[0] = float_from_bits(param[0] << 16), p[1] = float_from_bits(param[0] & 0xffff0000u);
    p[2] = float_from_bits(param[1] << 16), p[3] = float_from_bits(param[1] & 0xffff0000u);
  }
  __device__ static void store(const float* p, const uint32_t* noise, uint32_t* param, uint32_t*) {
    uint32_t y[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) y[k] = bits_of(p[k]) + __byte_perm(noise[k], 0, 0x4403);
    param[0] = __byte_perm(y[0], y[1], 0x7632), param[1] = __byte_perm(y[2], y[3], 0x7632);
  }
};

// Remainders are taken with their sign turned: then they are what the lower bits are after adding 0x8000, which rounds.
template <>
struct PackedWeights<Split16Weights> {
  static constexpr int kMasterWords = 2;
  __device__ static void join(const uint32_t* param, const uint32_t* master, float* p) {
#pragma unroll
    for (int k = 0; k < kWidth; k += 2) {
      const uint32_t turned = master[k / 2] ^ 0x80008000u;
      p[k] = float_from_bits(__byte_perm(turned, param[k / 2], 0x5410) - 0x8000u);
      p[k + 1] = float_from_bits(__byte_perm(turned, param[k / 2], 0x7632) - 0x8000u);
    }
  }
  __device__ static void store(const float* p, const uint32_t*, uint32_t* param, uint32_t* master) {
#pragma unroll
    for (int k = 0; k < kWidth; k += 2) {
      param[k / 2] = __byte_perm(bits_of(p[k]) + 0x8000u, bits_of(p[k + 1]) + 0x8000u, 0x7632);
      master[k / 2] = __byte_perm(bits_of(p[k]), bits_of(p[k + 1]), 0x5410);
    }
  }
};

template <>
struct PackedWeights<Split8Weights> {
  static constexpr int kMasterWords = 1;
  __device__ static void join(const uint32_t* param, const uint32_t* master, float* p) {
    // Adds two of the four signed bytes, one 256 times and the other one 0 times.
    constexpr int kFirst = 256, kSecond = 256 << 16;
    const int bytes = int(*master);
    p[0] = float_from_bits(uint32_t(__dp2a_lo(kFirst, bytes, int(param[0] << 16))));
    p[1] = float_from_bits(uint32_t(__dp2a_lo(kSecond, bytes, int(param[0] & 0xffff0000u))));
    p[2] = float_from_bits(uint32_t(__dp2a_hi(kFirst, bytes, int(param[1] << 16))));
    p[3] = float_from_bits(uint32_t(__dp2a_hi(kSecond, bytes, int(param[1] & 0xffff0000u))));
  }
  __device__ static void store(const float* p, const uint32_t* noise, uint32_t* param, uint32_t* master) {
    uint32_t y[kWidth], up[kWidth];  // rounded by the lowest byte of the noise, and half a unit of bf16 more
#pragma unroll
    for (int k = 0; k < kWidth; ++k) y[k] = __dp4a(noise[k], 1u, bits_of(p[k])), up[k] = y[k] + 0x8000u;
    param[0] = __byte_perm(up[0], up[1], 0x7632), param[1] = __byte_perm(up[2], up[3], 0x7632);
    const uint32_t first = __byte_perm(y[0], y[1], 0x0051), second = __byte_perm(y[2], y[3], 0x0051);
    *master = __byte_perm(first, second, 0x5410);
  }
};

// ---- moments: a quad of codes, one word -----------------------------------------------------------------------------

// Products here are exact, because one factor is a power of two (or so small beside the sum that they change no bit of
// it): one rounding gives what two do.
__device__ inline float exact_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }

// The same for pairs of bf16 numbers: the results here have no more than bf16's 8 bits.
__device__ inline uint32_t exact_fma_pair(uint32_t a, uint32_t b, uint32_t c) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#else
  const auto low = [](uint32_t pair) { return float_from_bits(pair << 16); };
  const auto high = [](uint32_t pair) { return float_from_bits(pair & 0xffff0000u); };
  const float first = exact_fma(low(a), low(b), low(c)), second = exact_fma(high(a), high(b), high(c));
  return __byte_perm(bits_of(first), bits_of(second), 0x7632);
#endif
}

// The bits of `a` where the mask has ones, those of `b` elsewhere: one instruction, which the compiler does not find.
__device__ inline uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(result) : "r"(a), "r"(b), "r"(mask));
  return result;
#else
  return (a & mask) | (b & ~mask);
#endif
}

template <bool kSecondMoment>
__device__ void decode_quad(uint32_t codes, uint32_t exponent, float* to);

template <>
__device__ inline void decode_quad<false>(uint32_t codes, uint32_t exponent, float* m) {
  constexpr uint32_t kBase = (kSignedBase >> 16) * 0x10001u, kSigns = 0x80008000u;
  const uint32_t factor = exponent * 0x00800080u;
  const uint32_t offset = exact_fma_pair(factor, kBase | kSigns, kSigns);  // -F(0) times the scale
  uint32_t low = codes & 0x007f007fu;
#if defined(__CUDA_ARCH__)
  asm("" : "+r"(low));  // or the shift comes first, and takes one instruction more
#endif
  const uint32_t even = exact_fma_pair((low << 3) + kBase, factor, offset) ^ (codes << 8 & kSigns);
  const uint32_t odd = exact_fma_pair(((codes & 0x7f007f00u) >> 5) + kBase, factor, offset) ^ (codes & kSigns);
  m[0] = float_from_bits(even << 16), m[1] = float_from_bits(odd << 16);
  m[2] = float_from_bits(even & 0xffff0000u), m[3] = float_from_bits(odd & 0xffff0000u);
}

template <>
__device__ inline void decode_quad<true>(uint32_t codes, uint32_t exponent, float* v) {
  const float factor = float_from_bits(exponent << 23), offset = factor * -float_from_bits(kUnsignedBase);
#pragma unroll
  for (int k = 0; k < kWidth; k += 2) {
    const auto code = [&](int i) {
      const uint32_t shifted = i < 3 ? codes << (kCodeShift - 8 * i) : codes >> (8 * i - kCodeShift);
      return float_from_bits(select_bits(0xffu << kCodeShift, shifted, kUnsignedBase));
    };
    const Pair pair = fused(Pair{code(k), code(k + 1)}, both(factor), both(offset));
    v[k] = pair.x, v[k + 1] = pair.y;
  }
}

// Adds a state's half of the noise times kTimes, and the other half 0 times: one multiplier for both.
template <int kStream, uint32_t kTimes>
__device__ uint32_t add_noise(float sum, uint32_t noise) {
  constexpr uint32_t kBytes = kTimes << 8 | kTimes << 16;
  return kStream == 0 ? __dp2a_lo(noise, kBytes, bits_of(sum)) : __dp2a_hi(noise, kBytes, bits_of(sum));
}

template <bool kSecondMoment, int kStream>
__device__ uint32_t encode_quad(const float* s, float inverse, const uint32_t* noise) {
  constexpr uint32_t kBase = kSecondMoment ? kUnsignedBase : kSignedBase;
  constexpr uint32_t kTimes = 1u << (kCodeShift - 16);
  constexpr uint32_t kSmallest = (kUnsignedBase + (uint32_t(kMinSecondMoment) << kCodeShift)) >> 16;
  uint32_t x[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; k += 2) {
    const Pair sum = fused(Pair{fabsf(s[k]), fabsf(s[k + 1])}, both(inverse), both(float_from_bits(kBase)));
    x[k] = add_noise<kStream, kTimes>(sum.x, noise[k]), x[k + 1] = add_noise<kStream, kTimes>(sum.y, noise[k + 1]);
  }
  // A code stands in bits 3 to 10 of a half: those of elements 1 and 3, turned by 8 bits, lie between the others.
  uint32_t even = __byte_perm(x[0], x[2], 0x7632), odd = __byte_perm(x[1], x[3], kSecondMoment ? 0x7632 : 0x6327);
  if constexpr (kSecondMoment) {
    even = __vmaxu2(even, kSmallest * 0x10001u);
    odd = __byte_perm(__vmaxu2(odd, kSmallest * 0x10001u), 0, 0x2103);
  }
  const uint32_t turned = select_bits(0x07f807f8u, even, odd);
  const uint32_t codes = __funnelshift_r(turned, turned, 3);
  if constexpr (kSecondMoment) return codes;
  const uint32_t first = __byte_perm(bits_of(s[0]), bits_of(s[1]), 0x0073);
  const uint32_t second = __byte_perm(bits_of(s[2]), bits_of(s[3]), 0x0073);
  return select_bits(0x7f7f7f7fu, codes, __byte_perm(first, second, 0x5410));
}

// ---- scales ---------------------------------------------------------------------------------------------------------

// A quantisation block's, of two states at once: the upper halves of their largest magnitudes are compared as 16-bit
// numbers.
struct Scales {
  uint32_t exponent[2];  // the lowest bytes
  float inverse[2];

  __device__ Scales(uint32_t largest_first, uint32_t largest_second) {
    constexpr uint32_t kBoth = 0x10001u, kRaise = kHeadroom >> 16;
    constexpr uint32_t kBelow = ((kSmallestScale << 7) - kRaise) * kBoth, kAbove = ((254 << 7) - 1 - kRaise) * kBoth;
    uint32_t largest = __byte_perm(largest_first, largest_second, 0x7632);
#pragma unroll
    for (int lanes = kQuantBlockThreads / 2; lanes > 0; lanes /= 2) {
      largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    if (__vminu2(__vmaxu2(largest, kBelow), kAbove) == largest) {
      largest += kRaise * kBoth;
      exponent[0] = largest >> 7, exponent[1] = largest >> 23;  // of which a byte is stored
      const uint32_t inverses = (254u << 7) * kBoth - (largest & 0xff80ff80u);
      inverse[0] = float_from_bits(inverses << 16), inverse[1] = float_from_bits(inverses & 0xffff0000u);
    } else {  // a second moment that is NaN may have a sign
      exponent[0] = scale_of(largest << 16), exponent[1] = scale_of(largest & 0x7fff0000u);
      inverse[0] = inverse_scale(exponent[0]), inverse[1] = inverse_scale(exponent[1]);
    }
  }
};

// ---- states: their largest magnitudes give what is common to a thread's elements -----------------------------------

template <States kFormat>
struct PackedStates;

template <>
struct PackedStates<States::kInt8> : Scales {
  static constexpr int kQuadWords = 1;
  template <int kStates>
  __device__ PackedStates(float (&)[kStates][kEight], const uint32_t (&largest)[kStates])
      : Scales(largest[0], largest[kStates - 1]) {}

  template <bool kSecondMoment>
  __device__ static void decode(const uint32_t* codes, uint32_t exponent, float* s) {
    decode_quad<kSecondMoment>(*codes, exponent, s);
  }
  template <bool kSecondMoment, int kState>
  __device__ void encode(const float* s, const uint32_t* noise, uint32_t* codes) const {
    *codes = encode_quad<kSecondMoment, kState>(s, inverse[kState], noise);
  }
};

// flush_subnormal() but for NaNs. -0 becomes 0 as there.
__device__ inline float flushed(float value) {
#if defined(__CUDA_ARCH__)
  float result;
  asm("add.rn.ftz.f32 %0, %1, 0f00000000;" : "=f"(result) : "f"(value));
  return result;
#else
  return flush_subnormal(value);
#endif
}

template <>
struct PackedStates<States::kBfloat16> {
  static constexpr int kQuadWords = 2;
  template <int kStates>
  __device__ PackedStates(float (&s)[kStates][kEight], const uint32_t (&largest)[kStates]) {
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
#pragma unroll
      for (int k = 0; k < kEight; ++k) s[j][k] = flushed(s[j][k]);
      if (largest[j] > 0x7f800000u) {  // one is NaN
#pragma unroll
        for (int k = 0; k < kEight; ++k) s[j][k] = float_from_bits(bits_or_nan(s[j][k]));
      }
    }
  }

  template <bool>
  __device__ static void decode(const uint32_t* words, uint32_t, float* s) {
    PackedWeights<StochasticWeights>::join(words, nullptr, s);
  }
  template <bool, int kState>
  __device__ void encode(const float* s, const uint32_t* noise, uint32_t* words) const {
#pragma unroll
    for (int k = 0; k < kWidth; k += 2) {
      words[k / 2] =
          __byte_perm(add_noise<kState, 1>(s[k], noise[k]), add_noise<kState, 1>(s[k + 1], noise[k + 1]), 0x7632);
    }
  }
};

}  // namespace accumfused::AF_TARGET
