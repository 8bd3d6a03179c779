// Adam's moments in 8 bits beside bf16 parameters: the formats of large models, and the same bits as formats.cuh in
// half of its instructions. A thread has 8 neighbouring elements, 16 threads a block; what the threads of a block do
// alike is shared by twice as many elements, and numbers are packed and unpacked several at a time.
#pragma once
#include "../rules.h"
#include "formats.cuh"

namespace accumfused::AF_TARGET {

constexpr int kEight = 2 * kWidth;
constexpr int kBlockLanes = int(kBlock) / kEight;

// ---- memory ---------------------------------------------------------------------------------------------------------

// The words of 8 elements, from a boundary of as many bytes, at most 16.
template <int kWords>
__device__ void load_words(const void* from, uint32_t (&to)[kWords]) {
  if constexpr (kWords == 2) {
    const uint2 two = *static_cast<const uint2*>(from);
    to[0] = two.x, to[1] = two.y;
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
  if constexpr (kWords == 2) *static_cast<uint2*>(to) = {from[0], from[1]};
  else *static_cast<uint4*>(to) = {from[0], from[1], from[2], from[3]};
}

// ---- weights: a quad of elements, two words of bf16 -----------------------------------------------------------------

template <class W>
struct PackedWeights;

template <>
struct PackedWeights<Bfloat16Weights<true>> {
  static constexpr int kMasterWords = 0;
  __device__ static void join(const uint32_t* param, const uint32_t*, float* p) {
    p[0] = float_from_bits(param[0] << 16), p[1] = float_from_bits(param[0] & 0xffff0000u);
    p[2] = float_from_bits(param[1] << 16), p[3] = float_from_bits(param[1] & 0xffff0000u);
  }
  __device__ static void store(const float* p, const uint32_t* noise, uint32_t* param, uint32_t*) {
    uint32_t y[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) y[k] = bits_of(p[k]) + (stream<kWeightStream>(noise[k]) >> 16);
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
    const uint32_t turned = *master ^ 0x80808080u, even = turned & 0x00ff00ffu, odd = turned & 0xff00ff00u;
    p[0] = float_from_bits(__byte_perm(even, param[0], 0x5401) - 0x8000u);
    p[1] = float_from_bits(__byte_perm(odd, param[0], 0x7610) - 0x8000u);
    p[2] = float_from_bits(__byte_perm(even, param[1], 0x5423) - 0x8000u);
    p[3] = float_from_bits(__byte_perm(odd, param[1], 0x7630) - 0x8000u);
  }
  __device__ static void store(const float* p, const uint32_t* noise, uint32_t* param, uint32_t* master) {
    uint32_t y[kWidth];
#pragma unroll
    for (int k = 0; k < kWidth; ++k) y[k] = bits_of(p[k]) + 0x8000u + (stream<kWeightStream>(noise[k]) >> 24);
    param[0] = __byte_perm(y[0], y[1], 0x7632), param[1] = __byte_perm(y[2], y[3], 0x7632);
    const uint32_t first = __byte_perm(y[0], y[1], 0x0051), second = __byte_perm(y[2], y[3], 0x0051);
    *master = __byte_perm(first, second, 0x5410) ^ 0x80808080u;
  }
};

// ---- moments: a quad of codes, one word -----------------------------------------------------------------------------

// Products here are exact, because one factor is a power of two (or so small beside the sum that they change no bit of
// it): one rounding gives what two do.
__device__ inline float exact_fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return fmaf(a, b, c);
#endif
}

// The same for pairs of bf16 numbers; what they are used for has no more than the 8 bits that bf16 keeps.
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

__device__ inline void decode_first(uint32_t codes, uint32_t exponent, float* m) {
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

__device__ inline void decode_second(uint32_t codes, uint32_t exponent, float* v) {
  const float factor = float_from_bits(exponent << 23), offset = factor * -float_from_bits(kUnsignedBase);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    const uint32_t code = __byte_perm(codes, 0, 0x4440 + k);
    v[k] = exact_fma(float_from_bits((code << kCodeShift) + kUnsignedBase), factor, offset);
  }
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

// Codes from the upper halves of four sums, where they stand in bits 3 to 10: of elements 0 and 2, and 1 and 3.
__device__ inline uint32_t pack_codes(uint32_t even, uint32_t odd) {
  return select_bits(0x00ff00ffu, even >> 3, odd << 5);
}

__device__ inline uint32_t encode_first(const float* m, float inverse, const uint32_t* noise) {
  uint32_t x[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    x[k] = bits_of(exact_fma(fabsf(m[k]), inverse, float_from_bits(kSignedBase))) + (noise[k] >> (32 - kCodeShift));
  }
  const uint32_t codes = pack_codes(__byte_perm(x[0], x[2], 0x7632), __byte_perm(x[1], x[3], 0x7632));
  const uint32_t first = __byte_perm(bits_of(m[0]), bits_of(m[1]), 0x0073);
  const uint32_t second = __byte_perm(bits_of(m[2]), bits_of(m[3]), 0x0073);
  return select_bits(0x7f7f7f7fu, codes, __byte_perm(first, second, 0x5410));
}

__device__ inline uint32_t encode_second(const float* v, float inverse, const uint32_t* noise) {
  constexpr uint32_t kSmallest = (kUnsignedBase + (uint32_t(kMinSecondMoment) << kCodeShift)) >> 16;
  uint32_t x[kWidth];
#pragma unroll
  for (int k = 0; k < kWidth; ++k) {
    x[k] = bits_of(exact_fma(fabsf(v[k]), inverse, float_from_bits(kUnsignedBase))) +
           (stream<1>(noise[k]) >> (32 - kCodeShift));
  }
  const uint32_t even = __vmaxu2(__byte_perm(x[0], x[2], 0x7632), kSmallest * 0x10001u);
  const uint32_t odd = __vmaxu2(__byte_perm(x[1], x[3], 0x7632), kSmallest * 0x10001u);
  return pack_codes(even, odd);
}

// ---- a block's scales -----------------------------------------------------------------------------------------------

// Of both moments at once: the upper halves of their largest magnitudes are compared as 16-bit numbers.
struct Scales {
  uint32_t first, second;
  float first_inverse, second_inverse;

  __device__ Scales(uint32_t largest_first, uint32_t largest_second) {
    constexpr uint32_t kBoth = 0x10001u, kBelow = (kSmallestScale << 7) * kBoth, kAbove = ((254 << 7) - 1) * kBoth;
    uint32_t largest = __byte_perm(largest_first, largest_second, 0x7632) + (kHeadroom >> 16) * kBoth;
#pragma unroll
    for (int lanes = kBlockLanes / 2; lanes > 0; lanes /= 2) {
      largest = __vmaxu2(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    first = largest << 16 >> 23, second = largest >> 23;
    if (__vminu2(__vmaxu2(largest, kBelow), kAbove) == largest) {
      first_inverse = float_from_bits((254u << 23) - (largest << 16 & 0xff800000u));
      second_inverse = float_from_bits((254u << 23) - (largest & 0xff800000u));
    } else {
      first = scale_of_exponent(first), second = scale_of_exponent(second);
      first_inverse = inverse_scale(first), second_inverse = inverse_scale(second);
    }
  }
};

// ---- root and quotient -----------------------------------------------------------------------------------------------

// What the compiler makes of square_root() and of a division on their usual way, without the test of each number for
// the unusual one: subnormals, zeros, and what becomes one of them.
__device__ inline float usual_root(float value) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(value));
  const float root = value * y;
  return __fmaf_rn(__fmaf_rn(-root, root, value), y * 0.5f, root);
#else
  return square_root(value);
#endif
}

__device__ inline float usual_quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
  y = __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y);
  const float quotient = a * y;
  return __fmaf_rn(y, __fmaf_rn(-b, quotient, a), quotient);
#else
  return a / b;
#endif
}

// The least and the greatest magnitudes of a thread's moments.
struct Extent {
  uint32_t least_first, most_first, least_second, most_second;

  __device__ Extent(const float (&m)[kEight], const float (&v)[kEight])
      : least_first(bits_of(fabsf(m[0]))),
        most_first(least_first),
        least_second(bits_of(v[0])),
        most_second(least_second) {
#pragma unroll
    for (int k = 1; k < kEight; ++k) {
      least_first = bits_of(fminf(float_from_bits(least_first), fabsf(m[k])));
      most_first = larger_magnitude(most_first, m[k]);
      least_second = min(least_second, bits_of(v[k]));
      most_second = max(most_second, bits_of(v[k]));
    }
  }

 private:
  // As integers, so that a NaN is larger than all.
  __device__ static uint32_t larger_magnitude(uint32_t most, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(float_from_bits(most)), "f"(fabsf(value)));
    return bits_of(result);
#else
    return max(most, bits_of(fabsf(value)));
#endif
  }
};

// Adam, and where root and quotient take their usual way: second moments from 2^-101 to 2^60 make denominators from 2^-51
// to 2^40, and with numerators from 2^-80 to 2^60 all that is computed on the way, remainders too, is a normal number. No
// parameter becomes NaN there that is none.
struct PackedAdam : Adam {
  float least_first, most_first;

  __device__ PackedAdam(const double* hyper, int64_t step, float coef) : Adam(hyper, step, coef) {
    const bool can_be = eps >= 0 && eps <= 0x1p38f && inverse_root >= 1 && inverse_root <= 0x1p9f &&
                        step_size >= 0x1p-40f && step_size <= 0x1p40f && decay > 0 && decay <= 1;
    least_first = 0x1p-80f / step_size, most_first = can_be ? 0x1p60f / step_size : -1.0f;
  }

  __device__ bool is_usual(const float (&p)[kEight], const Extent& extent) const {
    constexpr uint32_t kLeastSecond = (127u - 101) << 23, kMostSecond = (127u + 60) << 23;
    bool usual = float_from_bits(extent.least_first) >= least_first;
    usual &= float_from_bits(extent.most_first) <= most_first;
    usual &= extent.least_second >= kLeastSecond;
    usual &= extent.most_second <= kMostSecond;
#pragma unroll
    for (int k = 0; k < kEight; k += 2) usual &= p[k] == p[k] && p[k + 1] == p[k + 1];  // one comparison for both
    return usual;
  }
};

// ---- step -----------------------------------------------------------------------------------------------------------

// The streams of a chunk, eight elements a thread; in step_packed() all of them lie on boundaries of eight, or of 16
// bytes.
template <class W, class G>
struct Streams {
  static constexpr int kRow = kThreads * kEight, kMasterBytes = PackedWeights<W>::kMasterWords;
  const G* grad;
  Bfloat16* param;
  uint8_t *master, *codes[2], *scale[2];

  __device__ Streams(const Chunk& at, const G* grads, int lane)
      : grad(grads + lane),
        param(stream_at<Bfloat16>(at.row.param, at) + lane),
        master(global(static_cast<uint8_t*>(at.row.master)) + (at.offset + lane) * kMasterBytes) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      codes[s] = stream_at<uint8_t>(at.row.state[s], at) + lane;
      scale[s] = global(at.row.scale[s]) + (at.offset + lane) / kBlock;
    }
  }

  __device__ void advance() {
    grad += kRow, param += kRow, master += kRow * kMasterBytes;
#pragma unroll
    for (int s = 0; s < 2; ++s) codes[s] += kRow, scale[s] += kRow / kBlock;
  }
};

// The whole rows of 2048 elements of a chunk; how many elements that were. Weight decay is decoupled, or none.
template <class W, class G>
__device__ int step_blocks(const PackedAdam& rule, const Chunk& at, int count, const G* grads) {
  using Packed = PackedWeights<W>;
  constexpr int kRow = Streams<W, G>::kRow, kMaster = Packed::kMasterWords;
  const int lane = int(threadIdx.x) * kEight;
  Streams<W, G> streams(at, grads, lane);
  const Noise noise(at.row, at.index, count, 0, at.offset);
  uint32_t counter = noise.position(uint32_t(lane));
#pragma unroll 1
  for (int rows = at.n / kRow; rows > 0; --rows, counter += kRow * Noise::kStride) {
    read_anew();
    uint32_t grad[2 * sizeof(G)], param[4], codes[2][2];
    [[maybe_unused]] uint32_t master[kMaster > 0 ? 2 * kMaster : 1];
    load_words(streams.grad, grad);
    load_words(streams.param, param);
    if constexpr (kMaster > 0) load_words(streams.master, master);
    load_words(streams.codes[0], codes[0]);
    load_words(streams.codes[1], codes[1]);
    const uint32_t exponents[2] = {*streams.scale[0], *streams.scale[1]};
    streams.advance();

    float p[kEight], m[kEight], v[kEight];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      Packed::join(param + 2 * q, master + q * kMaster, p + q * kWidth);
      decode_first(codes[0][q], exponents[0], m + q * kWidth);
      decode_second(codes[1][q], exponents[1], v + q * kWidth);
    }
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      float g;
      if constexpr (sizeof(G) == 4) g = float_from_bits(grad[k]);
      else g = to_float(G{uint16_t(grad[k / 2] >> (k % 2 * 16))});
      rule.moments<false>(p[k], g, m[k], v[k]);
    }

    const Extent extent(m, v);
    if (rule.is_usual(p, extent)) {
#pragma unroll
      for (int k = 0; k < kEight; ++k) rule.move(p[k], m[k], usual_root(v[k]), usual_quotient);
    } else {
#pragma unroll
      for (int k = 0; k < kEight; ++k) {
        rule.move(p[k], m[k], square_root(v[k]), [](float a, float b) { return a / b; });
        p[k] = p[k] != p[k] ? float_from_bits(kNan) : p[k];
      }
    }

    const Scales scales(extent.most_first, extent.most_second);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      uint32_t random[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) random[k] = noise.at(counter + uint32_t(q * kWidth + k) * Noise::kStride);
      Packed::store(p + q * kWidth, random, param + 2 * q, master + q * kMaster);
      codes[0][q] = encode_first(m + q * kWidth, scales.first_inverse, random);
      codes[1][q] = encode_second(v + q * kWidth, scales.second_inverse, random);
    }
    store_words(streams.param - kRow, param);
    if constexpr (kMaster > 0) store_words(streams.master - kRow * kMaster, master);
    store_words(streams.codes[0] - kRow, codes[0]);
    store_words(streams.codes[1] - kRow, codes[1]);
    streams.scale[0][-kRow / kBlock] = uint8_t(scales.first);  // by all threads of the block: one access
    streams.scale[1][-kRow / kBlock] = uint8_t(scales.second);
  }
  return at.n / kRow * kRow;
}

template <class W>
__device__ int step_packed_as(const PackedAdam& rule, const Chunk& at, int count) {
  if (at.in.grad_dtype == Dtype::kFloat32) return step_blocks<W>(rule, at, count, stream_at<const float>(at.in.grad, at));
  return step_blocks<W>(rule, at, count, stream_at<const Bfloat16>(at.in.grad, at));
}

// The part of a chunk that the loops above are for, from its first element on; how many elements that were.
__device__ inline int step_packed(const PackedAdam& rule, const Chunk& at, int count) {
  const Row& row = at.row;
  const auto lie_on = [](int bytes, auto... addresses) { return (is_aligned(addresses, bytes / kWidth) && ...); };
  if (row.states != States::kInt8 || at.in.grad_dtype == Dtype::kFloat16 || rule.weight_decay != 0) return 0;
  if (!lie_on(16, at.in.grad, row.param) || !lie_on(8, row.master, row.state[0], row.state[1])) return 0;
  if (row.weights == Weights::kBfloat16Split8) return step_packed_as<Split8Weights>(rule, at, count);
  if (row.weights == Weights::kBfloat16Stochastic) return step_packed_as<Bfloat16Weights<true>>(rule, at, count);
  if (row.weights != Weights::kBfloat16Split16 || !lie_on(16, row.master)) return 0;
  return step_packed_as<Split16Weights>(rule, at, count);
}

}  // namespace accumfused::AF_TARGET
