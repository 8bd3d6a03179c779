// Parameters and states in every format, with a switch at each access: formats and rules add up in the code, and do not
// multiply. step_packed.cuh has loops for the common ones.
#pragma once
#include "../codecs.h"
#include "work.cuh"

namespace accumfused::AF_TARGET {

// ---- memory ---------------------------------------------------------------------------------------------------------

// Four elements of which only the size is known yet, at most kBytes each: all streams are asked for before the first
// one is waited for.
template <int kBytes>
struct Raw {
  Four<uint32_t> words = {};

  __device__ Raw(const Piece& at, const void* base, int bytes, int i) {
    if (kBytes == 4 && bytes == 4) keep(load_four<false>(stream_at<const uint32_t>(base, at), i, at.n));
    if (bytes == 2) keep(load_four<false>(stream_at<const uint16_t>(base, at), i, at.n));
    if (bytes == 1) keep(load_four<false>(stream_at<const uint8_t>(base, at), i, at.n));
  }

  template <class T>
  __device__ Four<T> as() const {
    Four<T> four;
    memcpy(&four, &words, sizeof four);
    return four;
  }

  template <class T>
  __device__ void to_floats(float (&to)[kWidth]) const {
    const Four<T> four = as<T>();
#pragma unroll
    for (int k = 0; k < kWidth; ++k) to[k] = to_float(four.each[k]);
  }

 private:
  template <class T>
  __device__ void keep(const Four<T>& four) {
    memcpy(&words, &four, sizeof four);
  }
};

// ---- weights --------------------------------------------------------------------------------------------------------

// Calls body with a number of the type that the format has in codecs.h.
template <class Body>
__device__ void with_weights(Weights weights, const Body& body) {
  int index = 0;
#define AF_CASE(...) \
  if (int(weights) == index++) return body(__VA_ARGS__());
  AF_WEIGHTS(AF_CASE)
#undef AF_CASE
}

// A parameter's two streams: its 16-bit numbers, if it has some, and the master beside them, or the fp32 numbers.
struct RawWeights {
  Raw<2> half;
  Raw<4> rest;

  __device__ RawWeights(const Piece& at, int i)
      : half(at, at.row.param, at.row.weights == Weights::kFloat32 ? 0 : 2, i),
        rest(at, at.row.weights == Weights::kFloat32 ? at.row.param : at.row.master, rest_bytes(at.row.weights), i) {}

  template <class W>
  __device__ void join(float (&p)[kWidth]) const {
    if constexpr (__is_same(W, Float32Weights)) {
      rest.to_floats<float>(p);
    } else if constexpr (__is_same(typename W::Master, void)) {
      half.to_floats<typename W::Param>(p);
    } else {
      const auto params = half.as<typename W::Param>();
      const auto masters = rest.as<typename W::Master>();
#pragma unroll
      for (int k = 0; k < kWidth; ++k) p[k] = W::join(params.each[k], masters.each[k]);
    }
  }

 private:
  __device__ static int rest_bytes(Weights weights) {
    int bytes = 0;
    with_weights(weights, [&](auto format) {
      using W = decltype(format);
      if constexpr (__is_same(W, Float32Weights)) bytes = sizeof(typename W::Param);
      else if constexpr (!__is_same(typename W::Master, void)) bytes = sizeof(typename W::Master);
    });
    return bytes;
  }
};

template <class W>
__device__ void store_weights(const Piece& at, int i, const float (&p)[kWidth], const uint32_t (&noise)[kWidth]) {
  Four<typename W::Param> param;
  if constexpr (__is_same(typename W::Master, void)) {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) param.each[k] = W::store(p[k], stream<kWeightStream>(noise[k]));
  } else {
    Four<typename W::Master> master;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) W::store(p[k], stream<kWeightStream>(noise[k]), param.each[k], master.each[k]);
    store_four<false>(stream_at<typename W::Master>(at.row.master, at), i, at.n, master);
  }
  store_four<false>(stream_at<typename W::Param>(at.row.param, at), i, at.n, param);
}

// The weights of rows whose states are fp32, in the loops of step.cuh.
template <class W>
struct WeightStreams {
  typename W::Param* const param;
  typename W::Master* const master;

  __device__ explicit WeightStreams(const Piece& at)
      : param(stream_at<typename W::Param>(at.row.param, at)),
        master(stream_at<typename W::Master>(at.row.master, at)) {}

  __device__ bool lie_on_boundaries() const {
    return is_aligned(param, sizeof *param) && is_aligned(master, sizeof *master);
  }

  template <bool kWhole, int kRows>
  __device__ void load(Access<kWhole, kRows>, int i, int n, float (&p)[kRows][kWidth]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const auto params = load_four<kWhole>(param + r * kLanes, i, n);
      const auto masters = load_four<kWhole>(master + r * kLanes, i, n);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) p[r][k] = W::join(params.each[k], masters.each[k]);
    }
  }

  template <bool kWhole, int kRows>
  __device__ void store(Access<kWhole, kRows>, int i, int n, const float (&p)[kRows][kWidth]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Four<typename W::Param> params;
      Four<typename W::Master> masters;
#pragma unroll
      for (int k = 0; k < kWidth; ++k) W::store(p[r][k], 0, params.each[k], masters.each[k]);
      store_four<kWhole>(param + r * kLanes, i, n, params);
      store_four<kWhole>(master + r * kLanes, i, n, masters);
    }
  }
};

template <>
struct WeightStreams<Float32Weights> {
  float* const param;

  __device__ explicit WeightStreams(const Piece& at) : param(stream_at<float>(at.row.param, at)) {}
  __device__ bool lie_on_boundaries() const { return is_aligned(param, sizeof *param); }

  template <class A, int kRows>
  __device__ void load(A access, int i, int n, float (&p)[kRows][kWidth]) const {
    access.load(param, i, n, p);
  }
  template <class A, int kRows>
  __device__ void store(A access, int i, int n, const float (&p)[kRows][kWidth]) const {
    access.store(param, i, n, p);
  }
};

// ---- states ---------------------------------------------------------------------------------------------------------

// The largest number of a warp, for each of its threads.
__device__ inline uint32_t warp_max(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
#else
  return __reduce_max_sync(0xffffffffu, value);
#endif
}

template <bool kSecondMoment>
__device__ void decode_state(States states, const Raw<4>& raw, uint32_t exponent, float (&s)[kWidth]) {
  if (states == States::kFloat32) return raw.to_floats<float>(s);
  if (states == States::kBfloat16) return raw.to_floats<Bfloat16>(s);
  const Four<uint8_t> codes = raw.as<uint8_t>();
  const float factor = scale_factor(exponent);
#pragma unroll
  for (int k = 0; k < kWidth; ++k) s[k] = decode<kSecondMoment>(uint32_t(codes.each[k]), factor);
}

// A warp holds a quantisation block of 8-bit states: all its threads come here.
template <bool kSecondMoment, int kStream>
__device__ void store_state(const Piece& at, int state, int i, const float (&s)[kWidth],
                            const uint32_t (&noise)[kWidth]) {
  void* const to = at.row.state[state];
  if (at.row.states == States::kFloat32) {
    Four<float> four;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) four.each[k] = flush_subnormal(s[k]);
    store_four<false>(stream_at<float>(to, at), i, at.n, four);
  } else if (at.row.states == States::kBfloat16) {
    Four<Bfloat16> four;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) four.each[k] = to_bfloat16(flush_subnormal(s[k]), stream<kStream>(noise[k]));
    store_four<false>(stream_at<Bfloat16>(to, at), i, at.n, four);
  } else {
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) largest = max(largest, i + k < at.n ? bits_of(s[k]) & 0x7fffffffu : 0);
    const uint32_t exponent = scale_of(warp_max(largest));
    const float inverse = inverse_scale(exponent);
    Four<uint8_t> codes;
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      codes.each[k] = uint8_t(encode<kSecondMoment>(s[k], inverse, stream<kStream>(noise[k])));
    store_four<false>(stream_at<uint8_t>(to, at), i, at.n, codes);
    if (i % kQuantBlock == 0) global(at.row.scale[state])[(at.offset + i) / kQuantBlock] = uint8_t(exponent);
  }
}

}  // namespace accumfused::AF_TARGET
