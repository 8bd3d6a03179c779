// One or two 8-bit states beside bf16 parameters, in half of step_formatted.cuh's instructions. A thread has 8
// neighbouring elements, 16 threads have a quantisation block: twice as many elements share the work that is common to
// them. packed.cuh packs several numbers at a time. For AdamW one test for unusual numbers is for all roots and
// quotients of a thread.
#pragma once
#include "../rules.h"
#include "packed.cuh"
#include "step_formatted.cuh"

namespace accumfused::AF_TARGET {

// ---- root and quotient ----------------------------------------------------------------------------------------------

// The compiler's own instructions for square_root() and a division, one by one, without its test of each number for
// subnormals, zeros, and numbers that become one of them. `y` is the hardware's approximation of 1 / sqrt(value), or of
// 1 / b; tests/conformance/test_emulation.py tries all approximations within the documented error.
__device__ inline float refined_root(float value, float y) {
  const float root = value * y;
  return __fmaf_rn(__fmaf_rn(-root, root, value), y * 0.5f, root);
}

__device__ inline float usual_root(float value) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(value));
#else
  const float y = 1.0f / square_root(value);
#endif
  return refined_root(value, y);
}

__device__ inline float refined_quotient(float a, float b, float y) {
  y = __fmaf_rn(y, __fmaf_rn(-b, y, 1.0f), y);
  const float quotient = a * y;
  return __fmaf_rn(y, __fmaf_rn(-b, quotient, a), quotient);
}

// `a` is not 0: of -0 it would lose the sign.
__device__ inline float usual_quotient(float a, float b) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(b));
#else
  const float y = 1.0f / b;
#endif
  return refined_quotient(a, b, y);
}

// The larger of two magnitudes' bits. As integers, so that a NaN is larger than all.
__device__ inline uint32_t larger_magnitude(uint32_t most, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(float_from_bits(most)), "f"(fabsf(value)));
  return bits_of(result);
#else
  return max(most, bits_of(fabsf(value)));
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
};

// A rule for a thread's elements.
template <class Rule>
struct PackedRule : Rule {
  using Rule::Rule;
  __device__ bool applies() const { return true; }

  // half(k): what the k-th parameter is without its remainder. `largest`: the bits of each state's largest magnitude.
  template <class Half>
  __device__ void update(const float (&g)[kEight], const Half& half, float (&p)[kEight],
                         float (&s)[Rule::kStates][kEight], uint32_t (&largest)[Rule::kStates]) const {
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      if (p[k] != p[k]) p[k] = half(k);  // as joined() does: a NaN was written from outside, or is one by itself
      apply(static_cast<const Rule&>(*this), p[k], g[k], [&](int j) -> float& { return s[j][k]; });
      p[k] = p[k] != p[k] ? float_from_bits(kNan) : p[k];
#pragma unroll
      for (int j = 0; j < Rule::kStates; ++j) largest[j] = larger_magnitude(k > 0 ? largest[j] : 0, s[j][k]);
    }
  }
};

// Adam in two halves, and the bounds within which root and quotient take their usual way. Second moments from 2^-101 to
// 2^60 make denominators from 2^-51 to 2^40. With numerators from 2^-80 to 2^60 every number on the way, remainders
// too, is normal then, and no parameter becomes NaN.
template <>
struct PackedRule<AdamFunctor> : AdamFunctor {
  float least_first, most_first;

  __device__ PackedRule(const double* hyper, const float* const* kept, int64_t step, float coef)
      : AdamFunctor(hyper, kept, step, coef) {
    const bool can_be = eps_ >= 0 && eps_ <= 0x1p38f && inverse_root_ >= 1 && inverse_root_ <= 0x1p9f &&
                        step_size_ >= 0x1p-40f && step_size_ <= 0x1p40f && decay_ > 0 && decay_ <= 1;
    least_first = 0x1p-80f / step_size_, most_first = can_be ? 0x1p60f / step_size_ : -1.0f;
  }

  __device__ bool applies() const { return weight_decay_ == 0; }

  // The same operations as the functor's, up to the root and from there on, without L2 weight decay.
  __device__ void moments(float grad, float& exp_avg, float& exp_avg_sq) const {
    const float g = grad * coefficient;
    exp_avg = exp_avg * beta1_ + g * one_minus_beta1_;
    exp_avg_sq = exp_avg_sq * beta2_ + (g * g) * one_minus_beta2_;
  }

  template <class Divide>
  __device__ void move(float& p, float exp_avg, float root, const Divide& divide) const {
    const float denominator = root * inverse_root_ + eps_;
    p = p * decay_ - divide(exp_avg * step_size_, denominator);
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

  template <class Half>
  __device__ void update(const float (&g)[kEight], const Half& half, float (&p)[kEight], float (&s)[2][kEight],
                         uint32_t (&largest)[2]) const {
    float (&m)[kEight] = s[0], (&v)[kEight] = s[1];
#pragma unroll
    for (int k = 0; k < kEight; ++k) moments(g[k], m[k], v[k]);
    const Extent extent(m, v);
    largest[0] = extent.most_first, largest[1] = extent.most_second;
    if (is_usual(p, extent)) {
#pragma unroll
      for (int k = 0; k < kEight; ++k) move(p[k], m[k], usual_root(v[k]), usual_quotient);
    } else {
#pragma unroll
      for (int k = 0; k < kEight; ++k) {
        if (p[k] != p[k]) p[k] = half(k);
        move(p[k], m[k], square_root(v[k]), [](float a, float b) { return a / b; });
        p[k] = p[k] != p[k] ? float_from_bits(kNan) : p[k];
      }
    }
  }
};

// ---- step -----------------------------------------------------------------------------------------------------------

// The streams of a chunk, eight elements a thread. They lie on boundaries of eight elements, or of 16 bytes.
template <class W, class G, int kStates>
struct Streams {
  static constexpr int kRow = Policy::kThreads * kEight, kMasterBytes = PackedWeights<W>::kMasterWords;
  const G* grad;
  Bfloat16* param;
  uint8_t *master, *codes[kStates], *scale[kStates];

  __device__ Streams(const Piece& at, const G* grads, int lane)
      : grad(grads + lane),
        param(stream_at<Bfloat16>(at.row.param, at) + lane),
        master(global(static_cast<uint8_t*>(at.row.master)) + (at.offset + lane) * kMasterBytes) {
#pragma unroll
    for (int s = 0; s < kStates; ++s) {
      codes[s] = stream_at<uint8_t>(at.row.state[s], at) + lane;
      scale[s] = global(at.row.scale[s]) + (at.offset + lane) / kQuantBlock;
    }
  }

  __device__ void advance() {
    grad += kRow, param += kRow, master += kRow * kMasterBytes;
#pragma unroll
    for (int s = 0; s < kStates; ++s) codes[s] += kRow, scale[s] += kRow / kQuantBlock;
  }
};

template <int kStates, class Body>
__device__ void for_each_state(const Body& body) {
  static_assert(kStates == 1 || kStates == 2, "Scales is for two states");
  body(std::integral_constant<int, 0>());
  if constexpr (kStates == 2) body(std::integral_constant<int, 1>());
}

// The whole rows of 2048 elements of a chunk; how many elements that were.
template <class W, class Rule, class G>
__device__ int step_blocks(const PackedRule<Rule>& rule, const Piece& at, int count, const G* grads) {
  using Packed = PackedWeights<W>;
  constexpr int kStates = Rule::kStates, kRow = Streams<W, G, kStates>::kRow, kMaster = Packed::kMasterWords;
  const int lane = int(threadIdx.x) * kEight;
  Streams<W, G, kStates> streams(at, grads, lane);
  const Noise noise(at.row, at.index, count, at.offset - at.in_chunk());
  uint64_t position = noise.position(uint32_t(at.in_chunk() + lane) / 2);
#pragma unroll 1
  for (int rows = at.n / kRow; rows > 0; --rows, position += kRow / 2 * Noise::kStride) {
    read_anew();
    uint32_t grad[2 * sizeof(G)], param[4], codes[kStates][2], exponents[kStates];
    [[maybe_unused]] uint32_t master[kMaster > 0 ? 2 * kMaster : 1];
    load_words(streams.grad, grad);
    load_words(streams.param, param);
    if constexpr (kMaster > 0) load_words(streams.master, master);
#pragma unroll
    for (int j = 0; j < kStates; ++j) load_words(streams.codes[j], codes[j]);
#pragma unroll
    for (int j = 0; j < kStates; ++j) exponents[j] = *streams.scale[j];
    streams.advance();

    float p[kEight], g[kEight], s[kStates][kEight];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      Packed::join(param + 2 * q, master + q * kMaster, p + q * kWidth);
      for_each_state<kStates>([&](auto state) {
        constexpr int kState = decltype(state)::value;
        decode_quad<(kState >= Rule::kFirstSecondMoment)>(codes[kState][q], exponents[kState], s[kState] + q * kWidth);
      });
    }
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      if constexpr (sizeof(G) == 4) g[k] = float_from_bits(grad[k]);
      else g[k] = to_float(G{uint16_t(grad[k / 2] >> (k % 2 * 16))});
    }
    uint32_t largest[kStates];
    const auto half = [&](int k) { return float_from_bits(k % 2 ? param[k / 2] & 0xffff0000u : param[k / 2] << 16); };
    rule.update(g, half, p, s, largest);

    const Scales scales(largest[0], largest[kStates - 1]);
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      uint32_t random[kWidth];
#pragma unroll
      for (int k = 0; k < kWidth; k += 2) {
        const uint64_t pair = Noise::at(position + (q * kWidth + k) / 2 * Noise::kStride);
        random[k] = uint32_t(pair), random[k + 1] = uint32_t(pair >> 32);
      }
      Packed::store(p + q * kWidth, random, param + 2 * q, master + q * kMaster);
      for_each_state<kStates>([&](auto state) {
        constexpr int kState = decltype(state)::value;
        constexpr bool kSecondMoment = kState >= Rule::kFirstSecondMoment;
        codes[kState][q] = encode_quad<kSecondMoment, kState>(s[kState] + q * kWidth, scales.inverse[kState], random);
      });
    }
    store_words(streams.param - kRow, param);
    if constexpr (kMaster > 0) store_words(streams.master - kRow * kMaster, master);
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      store_words(streams.codes[j] - kRow, codes[j]);
      streams.scale[j][-kRow / kQuantBlock] = uint8_t(scales.exponent[j]);  // by all its threads: one access
    }
  }
  return at.n / kRow * kRow;
}

template <class W, class Rule>
__device__ int step_packed_as(const PackedRule<Rule>& rule, const Piece& at, int count) {
  if (at.in.grad_dtype == Dtype::kFloat32)
    return step_blocks<W>(rule, at, count, stream_at<const float>(at.in.grad, at));
  return step_blocks<W>(rule, at, count, stream_at<const Bfloat16>(at.in.grad, at));
}

// The part of a chunk that the loops above are for, from its first element on; how many elements that were.
template <class Rule>
__device__ int step_packed(const PackedRule<Rule>& rule, const Piece& at, int count) {
  const Row& row = at.row;
  const auto lie_on = [](int bytes, auto... addresses) { return (is_aligned(addresses, bytes / kWidth) && ...); };
  if (row.states != States::kInt8 || at.in.grad_dtype == Dtype::kFloat16 || !rule.applies() || row.origin % 2 != 0)
    return 0;
  if (!lie_on(16, at.in.grad, row.param) || !lie_on(8, row.master, row.state[0], row.state[1])) return 0;
  if (row.weights == Weights::kBfloat16Split8) return step_packed_as<Split8Weights>(rule, at, count);
  if (row.weights == Weights::kBfloat16Stochastic) return step_packed_as<StochasticWeights<Bfloat16>>(rule, at, count);
  if (row.weights != Weights::kBfloat16Split16 || !lie_on(16, row.master)) return 0;
  return step_packed_as<Split16Weights>(rule, at, count);
}

}  // namespace accumfused::AF_TARGET
