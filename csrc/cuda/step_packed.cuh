// One or two states in 8 or 16 bits beside bf16 parameters, in half of step_formatted.cuh's instructions. A thread has
// 8 neighbouring elements, 16 threads have a quantisation block: twice as many elements share the work that is common
// to them. packed.cuh packs several numbers at a time. For AdamW one test for unusual numbers is for all roots and
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
__device__ inline Pair refined_root(Pair value, Pair y) {
  const Pair root = value * y;
  return fused(fused(-root, root, value), y * 0.5f, root);
}

__device__ inline float inverse_root(float value) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(value));
  return y;
#else
  return 1.0f / square_root(value);
#endif
}

__device__ inline Pair usual_root(Pair value) {
  return refined_root(value, {inverse_root(value.x), inverse_root(value.y)});
}

__device__ inline Pair refined_quotient(Pair a, Pair b, Pair y) {
  y = fused(y, fused(-b, y, both(1.0f)), y);
  const Pair quotient = a * y;
  return fused(y, fused(-b, quotient, a), quotient);
}

__device__ inline float inverse(float value) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(value));
  return y;
#else
  return 1.0f / value;
#endif
}

// `a` is not 0: of -0 it would lose the sign.
__device__ inline Pair usual_quotient(Pair a, Pair b) { return refined_quotient(a, b, {inverse(b.x), inverse(b.y)}); }

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

// The smaller of two magnitudes; NaN if either is one.
__device__ inline float smaller_magnitude(float least, float value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(fabsf(least)), "f"(fabsf(value)));
  return result;
#else
  return fabsf(value) >= fabsf(least) || least != least ? fabsf(least) : fabsf(value);
#endif
}

// The least magnitude of a thread's parameters, and the greatest ones of its moments.
struct Extent {
  float least_param;
  uint32_t most_first, least_second, most_second;

  __device__ Extent(const float (&p)[kEight], const float (&m)[kEight], const float (&v)[kEight])
      : least_param(p[0]), most_first(bits_of(fabsf(m[0]))), least_second(bits_of(v[0])), most_second(least_second) {
#pragma unroll
    for (int k = 1; k < kEight; ++k) {
      least_param = smaller_magnitude(least_param, p[k]);
      most_first = larger_magnitude(most_first, m[k]);
      least_second = min(least_second, bits_of(v[k]));
      most_second = max(most_second, bits_of(v[k]));
    }
  }
};

// A joined parameter without its remainder, which took away half a unit at most, or added less.
__device__ inline float without_remainder(float joined) {
  return float_from_bits(bits_of(joined) - uint32_t(int16_t(bits_of(joined))));
}

// A rule for a thread's elements.
template <class Rule>
struct alignas(16) PackedRule : Rule {
  using Rule::Rule;
  __device__ bool applies() const { return true; }

  // `largest`: the bits of each state's largest magnitude.
  __device__ void update(const float (&g)[kEight], float (&p)[kEight], float (&s)[Rule::kStates][kEight],
                         uint32_t (&largest)[Rule::kStates]) const {
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      // As joined() does: a NaN was written from outside, or is one by itself.
      if (p[k] != p[k]) p[k] = without_remainder(p[k]);
      apply(static_cast<const Rule&>(*this), p[k], g[k], [&](int j) -> float& { return s[j][k]; });
      p[k] = p[k] != p[k] ? float_from_bits(kNan) : p[k];
#pragma unroll
      for (int j = 0; j < Rule::kStates; ++j) largest[j] = larger_magnitude(k > 0 ? largest[j] : 0, s[j][k]);
    }
  }
};

// Adam in two halves, and the bounds within which root and quotient take their usual way. Second moments from 2^-101 to
// 2^60 make denominators from 2^-51, and from eps, to 2^40. With numerators up to 2^60, quotients are exact down to
// 2^-102, and where the numerator is that large: every remainder is a number, and all others are normal. A smaller
// quotient, zeros of both signs too, is below 2^-26 of a parameter from 2^-74 / (eps + 2^-51) on, and changes no bit.
template <>
struct alignas(16) PackedRule<AdamFunctor> : AdamFunctor {
  float least_param, most_first;

  __device__ PackedRule(const double* hyper, int64_t step, float coef) : AdamFunctor(hyper, step, coef) {
    const bool can_be = eps_ >= 0 && eps_ <= 1 && inverse_root_ >= 1 && inverse_root_ <= 0x1p9f &&
                        step_size_ >= 0x1p-40f && step_size_ <= 0x1p40f && decay_ > 0 && decay_ <= 1;
    least_param = 0x1p-74f / (eps_ + 0x1p-51f) / decay_, most_first = can_be ? 0x1p60f / step_size_ : -1.0f;
  }

  __device__ bool applies() const { return weight_decay_ == 0; }

  // The same operations as the functor's, up to the root and from there on, without L2 weight decay.
  __device__ void moments(Pair grad, Pair& exp_avg, Pair& exp_avg_sq) const {
    const Pair g = grad * coefficient;
    exp_avg = exp_avg * beta1_ + g * one_minus_beta1_;
    exp_avg_sq = exp_avg_sq * beta2_ + (g * g) * one_minus_beta2_;
  }

  template <class Number, class Divide>
  __device__ Number moved(Number p, Number exp_avg, Number root, const Divide& divide) const {
    const Number denominator = root * inverse_root_ + eps_;
    return p * decay_ - divide(exp_avg * step_size_, denominator);
  }

  __device__ bool is_usual(const Extent& extent) const {
    constexpr uint32_t kLeastSecond = (127u - 101) << 23, kMostSecond = (127u + 60) << 23;
    bool usual = extent.least_param >= least_param;
    usual &= float_from_bits(extent.most_first) <= most_first;
    usual &= extent.least_second >= kLeastSecond;
    usual &= extent.most_second <= kMostSecond;
    return usual;
  }

  __device__ void update(const float (&g)[kEight], float (&p)[kEight], float (&s)[2][kEight],
                         uint32_t (&largest)[2]) const {
    float (&m)[kEight] = s[0], (&v)[kEight] = s[1];
#pragma unroll
    for (int k = 0; k < kEight; k += 2) {
      Pair first = {m[k], m[k + 1]}, second = {v[k], v[k + 1]};
      moments({g[k], g[k + 1]}, first, second);
      m[k] = first.x, m[k + 1] = first.y, v[k] = second.x, v[k + 1] = second.y;
    }
    const Extent extent(p, m, v);
    largest[0] = extent.most_first, largest[1] = extent.most_second;
    if (is_usual(extent)) {
#pragma unroll
      for (int k = 0; k < kEight; k += 2) {
        const Pair root = usual_root({v[k], v[k + 1]});
        const Pair next = moved(Pair{p[k], p[k + 1]}, Pair{m[k], m[k + 1]}, root, usual_quotient);
        p[k] = next.x, p[k + 1] = next.y;
      }
    } else {
#pragma unroll
      for (int k = 0; k < kEight; ++k) {
        if (p[k] != p[k]) p[k] = without_remainder(p[k]);
        p[k] = moved(p[k], m[k], square_root(v[k]), [](float a, float b) { return a / b; });
        p[k] = p[k] != p[k] ? float_from_bits(kNan) : p[k];
      }
    }
  }
};

template <class Rule>
constexpr bool kIsPacked = false;
template <class Rule>
constexpr bool kIsPacked<PackedRule<Rule>> = true;

// ---- step -----------------------------------------------------------------------------------------------------------

// Where the streams of a chunk begin, on boundaries of eight elements, or of 16 bytes.
template <int kStates>
struct alignas(16) Streams {
  uint8_t *param, *master, *state[kStates];
  const uint8_t* grad;
};

// A chunk's scales, one per thread and state: read and written whole, in 32 bytes at a time. A warp's row has two, and
// to go to memory for these is an access as long as any other of its row.
template <int kStates>
struct SharedScales {
  uint8_t before[kStates][Policy::kThreads], after[kStates][Policy::kThreads];
};
static_assert(kChunk / kQuantBlock == Policy::kThreads);

// The index-th eight elements of a stream, each so many bytes.
template <class T>
__device__ T* eight_at(T* stream, int index, int bytes) {
  return global(stream) + int64_t(index) * (bytes * kEight);
}

// A lane's line of 128 bytes of what its warp reads, on its way into the L2 cache one row before the warp needs it. So
// a row waits for that cache alone, and no register waits for memory.
struct Prefetch {
  const uint8_t* at = nullptr;
  int stride = 0, line = int(threadIdx.x) % kWarp;

  // Takes a line of a stream, whose last row begins with that element, if one is left for this lane.
  __device__ void take(const uint8_t* stream, int bytes, int row) {
    constexpr int kLine = 128;
    const int lines = bytes * kEight * kWarp / kLine;
    if (line >= 0 && line < lines) {
      stride = Policy::kThreads * kEight * bytes;
      at = stream + int64_t(row) * bytes + int(threadIdx.x) / kWarp * (lines * kLine) + line * kLine;
    }
    line -= lines;
  }
  __device__ void ask() {
    if (at == nullptr) return;
    at -= stride;
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
#endif
  }
};

template <int kStates, class Body>
__device__ void for_each_state(const Body& body) {
  static_assert(kStates == 1 || kStates == 2, "Scales is for two states");
  body(std::integral_constant<int, 0>());
  if constexpr (kStates == 2) body(std::integral_constant<int, 1>());
}

// The whole rows of 2048 elements of a chunk, whose gradient has elements of kGrad bytes; how many elements that were.
template <class W, States kFormat, int kGrad, class Rule>
__device__ int step_blocks(const PackedRule<Rule>& rule, const Piece& at, int count, Streams<Rule::kStates>* of_warps,
                           SharedScales<Rule::kStates>& scales) {
  using Packed = PackedWeights<W>;
  using Format = PackedStates<kFormat>;
  constexpr int kStates = Rule::kStates, kRow = Policy::kThreads * kEight, kMaster = Packed::kMasterWords;
  constexpr int kStateBytes = Format::kQuadWords;
  constexpr bool kScaled = kStateBytes == 1;
  const auto for_each_scale = [&](const auto& body) {  // that is this thread's
    if (int(threadIdx.x) >= at.n / kRow * (kRow / int(kQuantBlock))) return;
#pragma unroll
    for (int j = 0; kScaled && j < kStates; ++j) {
      body(global(at.row.scale[j])[at.offset / kQuantBlock + threadIdx.x], j, threadIdx.x);
    }
  };
  for_each_scale([&](uint8_t& scale, int state, int i) { scales.before[state][i] = scale; });
  // Shuffled, or the compiler computes both addresses anew at each access.
  Streams<kStates>& own = of_warps[__shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0)];
  const PackedRule<Rule>* shared_rule = &rule + __shfl_sync(0xffffffffu, 0, 0);
  int index = (at.n / kRow - 1) * Policy::kThreads + int(threadIdx.x);  // backwards: its end takes no register
  __syncwarp();  // of the piece before, others may still be reading
  if (threadIdx.x % kWarp == 0) {
    const auto begin = [&](auto* base, int bytes) { return base + at.offset * bytes; };
    own.param = begin(static_cast<uint8_t*>(at.row.param), 2);
    own.master = begin(static_cast<uint8_t*>(at.row.master), kMaster);
    own.grad = begin(static_cast<const uint8_t*>(at.in.grad), kGrad);
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      own.state[j] = begin(static_cast<uint8_t*>(at.row.state[j]), kStateBytes);
    }
  }
  if constexpr (kScaled) __syncthreads();
  else __syncwarp();
  // Of two states, the loop reads them anew each time: it needs the registers for other things.
  std::conditional_t<kStates == 2, const Streams<kStates>&, const Streams<kStates>> streams = own;
  constexpr bool kPrefetches = kScaled && Policy::kPrefetchesAhead;
  [[maybe_unused]] Prefetch next_row;
  if constexpr (kPrefetches) {
    const int last = (at.n / kRow - 1) * kRow;
    next_row.take(own.grad, kGrad, last);
    next_row.take(own.param, 2, last);
    next_row.take(own.master, kMaster, last);
#pragma unroll
    for (int j = 0; j < kStates; ++j) next_row.take(own.state[j], kStateBytes, last);
  }
  const Noise noise(at.row, at.index, count, at.offset - at.in_chunk());
  uint64_t position = noise.position(uint32_t(at.in_chunk() + index * kEight) / 2);
#pragma unroll 1
  for (; index >= 0; index -= Policy::kThreads, position -= kRow / 2 * Noise::kStride) {
    read_anew();
    if (kPrefetches && index >= Policy::kThreads) next_row.ask();
    uint32_t grad[2 * kGrad], param[4], words[kStates][2 * Format::kQuadWords], exponents[kStates] = {};
    [[maybe_unused]] uint32_t master[kMaster > 0 ? 2 * kMaster : 1];
    load_words(eight_at(streams.grad, index, kGrad), grad);
    load_words(eight_at(streams.param, index, 2), param);
    if constexpr (kMaster > 0) load_words(eight_at(streams.master, index, kMaster), master);
#pragma unroll
    for (int j = 0; j < kStates; ++j) load_words(eight_at(streams.state[j], index, kStateBytes), words[j]);
#pragma unroll
    for (int j = 0; kScaled && j < kStates; ++j) {
      exponents[j] = scales.before[j][index / kQuantBlockThreads];
    }

    float p[kEight], g[kEight], s[kStates][kEight];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      Packed::join(param + 2 * q, master + q * kMaster, p + q * kWidth);
      for_each_state<kStates>([&](auto state) {
        constexpr int k = decltype(state)::value;
        constexpr bool kSecondMoment = k >= Rule::kFirstSecondMoment;
        Format::template decode<kSecondMoment>(words[k] + q * Format::kQuadWords, exponents[k], s[k] + q * kWidth);
      });
    }
#pragma unroll
    for (int k = 0; k < kEight; ++k) {
      if constexpr (kGrad == 4) g[k] = float_from_bits(grad[k]);
      else g[k] = to_float(Bfloat16{uint16_t(grad[k / 2] >> (k % 2 * 16))});
    }
    uint32_t largest[kStates];
    const PackedRule<Rule> whole = *shared_rule;  // in accesses of 16 bytes, each once
    whole.update(g, p, s, largest);

    const Format states(s, largest);
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
        constexpr int k = decltype(state)::value;
        constexpr bool kSecondMoment = k >= Rule::kFirstSecondMoment;
        states.template encode<kSecondMoment, k>(s[k] + q * kWidth, random, words[k] + q * Format::kQuadWords);
      });
    }
    read_anew();
    store_words(eight_at(streams.param, index, 2), param);
    if constexpr (kMaster > 0) store_words(eight_at(streams.master, index, kMaster), master);
#pragma unroll
    for (int j = 0; j < kStates; ++j) {
      store_words(eight_at(streams.state[j], index, kStateBytes), words[j]);
      // By all its threads, which is one access; to let one of them do it costs five instructions.
      if constexpr (kScaled) scales.after[j][index / kQuantBlockThreads] = uint8_t(states.exponent[j]);
    }
  }
  if constexpr (kScaled) __syncthreads();
  for_each_scale([&](uint8_t& scale, int state, int i) { scale = scales.after[state][i]; });
  return at.n / kRow * kRow;
}

// The part of a chunk that the loops above are for, from its first element on; how many elements that were.
template <class Rule>
__device__ int step_packed(const PackedRule<Rule>& rule, const Piece& at, int count) {
  __shared__ Streams<Rule::kStates> of_warps[Policy::kThreads / kWarp];
  __shared__ SharedScales<Rule::kStates> scales;
  const Row& row = at.row;
  const auto lie_on = [](int bytes, auto... addresses) { return (is_aligned(addresses, bytes / kWidth) && ...); };
  const auto step_as = [&](auto weights, auto states) {
    using W = decltype(weights);
    constexpr States kFormat = decltype(states)::value;
    if (at.in.grad_dtype == Dtype::kFloat32) return step_blocks<W, kFormat, 4>(rule, at, count, of_warps, scales);
    return step_blocks<W, kFormat, 2>(rule, at, count, of_warps, scales);
  };
  const auto step_with = [&](auto states) {
    if (row.weights == Weights::kBfloat16Split8) return step_as(Split8Weights(), states);
    if (row.weights == Weights::kBfloat16Stochastic) return step_as(StochasticWeights(), states);
    if (row.weights != Weights::kBfloat16Split16 || !lie_on(16, row.master)) return 0;
    return step_as(Split16Weights(), states);
  };
  if (at.in.grad_dtype == Dtype::kFloat16 || !rule.applies() || row.origin % 2 != 0) return 0;
  if (!lie_on(16, at.in.grad, row.param) || !lie_on(8, row.master, row.state[0], row.state[1])) return 0;
  if (row.states == States::kInt8) return step_with(std::integral_constant<States, States::kInt8>());
  if (row.states != States::kBfloat16 || !lie_on(16, row.state[0], row.state[1])) return 0;
  return step_with(std::integral_constant<States, States::kBfloat16>());
}

}  // namespace accumfused::AF_TARGET
