// The step of parameters and states that are not all kept in fp32: a tile at a time is decoded into the L1 cache,
// updated there by the same loop over fp32, and encoded. So formats and rules add up, and do not multiply.
#include <type_traits>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../codecs.h"

namespace accumfused::AF_TARGET {
namespace {

constexpr int64_t kTile = 4 * kQuantBlock;
// No two arrays lie 4096 bytes apart: where they did, one process in four took 1.3 times as long (EPYC with AVX-512).
constexpr int64_t kPadded = kTile + 64;

struct Tile {
  alignas(64) float param[kPadded], state[kMaxStates][kPadded];
  alignas(64) uint32_t noise[kPadded];
  alignas(64) float grad[kPadded];
};

// ---- weights --------------------------------------------------------------------------------------------------------

template <class W>
void load_weights(const Row& row, int64_t at, int64_t n, float* __restrict out) {
  const auto* __restrict param = static_cast<const typename W::Param*>(row.param) + at;
  if constexpr (__is_same(typename W::Master, void)) {
    for (int64_t i = 0; i < n; ++i) out[i] = W::join(param[i]);
  } else {
    const auto* __restrict master = static_cast<const typename W::Master*>(row.master) + at;
    for (int64_t i = 0; i < n; ++i) out[i] = W::join(param[i], master[i]);
  }
}

template <class W>
void store_weights(const Row& row, int64_t at, int64_t n, const float* __restrict from,
                   const uint32_t* __restrict noise) {
  auto* __restrict param = static_cast<typename W::Param*>(row.param) + at;
  if constexpr (__is_same(typename W::Master, void)) {
    for (int64_t i = 0; i < n; ++i) param[i] = W::store(from[i], stream<kWeightStream>(noise[i]));
  } else {
    auto* __restrict master = static_cast<typename W::Master*>(row.master) + at;
    for (int64_t i = 0; i < n; ++i) W::store(from[i], stream<kWeightStream>(noise[i]), param[i], master[i]);
  }
}

#define AF_LOAD(...) load_weights<__VA_ARGS__>,
constexpr void (*kLoadWeights[])(const Row&, int64_t, int64_t, float*) = {AF_WEIGHTS(AF_LOAD)};
#undef AF_LOAD
#define AF_STORE(...) store_weights<__VA_ARGS__>,
constexpr void (*kStoreWeights[])(const Row&, int64_t, int64_t, const float*, const uint32_t*) = {AF_WEIGHTS(AF_STORE)};
#undef AF_STORE

// ---- states ---------------------------------------------------------------------------------------------------------

template <bool kSecondMoment>
void decode_blocks(const uint8_t* __restrict codes, const uint8_t* scale, int64_t n, float* __restrict out) {
  for (int64_t first = 0; first < n; first += kQuantBlock) {
    const float factor = scale_factor(*scale++);
    const int64_t end = smaller(first + kQuantBlock, n);
    for (int64_t i = first; i < end; ++i) out[i] = decode<kSecondMoment>(uint32_t(codes[i]), factor);
  }
}

template <bool kSecondMoment, int kStream>
void encode_blocks(uint8_t* __restrict codes, uint8_t* scale, int64_t n, const float* __restrict from,
                   const uint32_t* __restrict noise) {
  for (int64_t first = 0; first < n; first += kQuantBlock) {
    const int64_t end = smaller(first + kQuantBlock, n);
    uint32_t largest = 0;
    for (int64_t i = first; i < end; ++i) largest = larger(largest, bits_of(from[i]) & 0x7fffffffu);
    const uint32_t exponent = scale_of(largest);
    *scale++ = uint8_t(exponent);
    const float inverse = inverse_scale(exponent);
    for (int64_t i = first; i < end; ++i) {
      codes[i] = uint8_t(encode<kSecondMoment>(from[i], inverse, stream<kStream>(noise[i])));
    }
  }
}

template <int kState, bool kSecondMoment>
void load_state(const Row& row, int64_t at, int64_t n, float* out) {
  if (row.states == States::kBfloat16) {
    const auto* __restrict from = static_cast<const Bfloat16*>(row.state[kState]) + at;
    for (int64_t i = 0; i < n; ++i) out[i] = to_float(from[i]);
  } else {
    decode_blocks<kSecondMoment>(static_cast<const uint8_t*>(row.state[kState]) + at,
                                 row.scale[kState] + at / kQuantBlock, n, out);
  }
}

template <int kState, bool kSecondMoment>
void store_state(const Row& row, int64_t at, int64_t n, const float* __restrict from,
                 const uint32_t* __restrict noise) {
  constexpr int kStream = kState == 0 ? 0 : 1;
  if (row.states == States::kBfloat16) {
    auto* __restrict to = static_cast<Bfloat16*>(row.state[kState]) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = to_bfloat16(flush_subnormal(from[i]), stream<kStream>(noise[i]));
  } else {
    encode_blocks<kSecondMoment, kStream>(static_cast<uint8_t*>(row.state[kState]) + at,
                                          row.scale[kState] + at / kQuantBlock, n, from, noise);
  }
}

// Calls body(number) for each state of the rule; the number is a constant.
template <class Rule, class Body>
AF_INLINE void for_each_state(const Body& body) {
  if constexpr (Rule::kStates > 0) body(std::integral_constant<int, 0>());
  if constexpr (Rule::kStates > 1) body(std::integral_constant<int, 1>());
  if constexpr (Rule::kStates > 2) body(std::integral_constant<int, 2>());
  if constexpr (Rule::kStates > 3) body(std::integral_constant<int, 3>());
}

// ---- gradients and noise --------------------------------------------------------------------------------------------

const float* fp32_grad(const Operands& in, int64_t at, int64_t n, float* tile) {
  if (in.grad_dtype == Dtype::kFloat32) return static_cast<const float*>(in.grad) + at;
  with_grad(in, at, [&](const auto* grad) {
    for (int64_t i = 0; i < n; ++i) tile[i] = to_float(grad[i]);
  });
  return tile;
}

// Compilers multiply whole numbers of 64 bits for the products of lower halves: that takes three times as long. (With a
// mask, because of _mm512_mul_epu32 GCC 12 warns.)
#if defined(__SSE2__)
#if defined(__AVX512F__)
using Pairs = uint64_t __attribute__((vector_size(64)));
AF_INLINE Pairs low_products(Pairs a, Pairs b) { return Pairs(_mm512_maskz_mul_epu32(0xff, __m512i(a), __m512i(b))); }
#elif defined(__AVX2__)
using Pairs = uint64_t __attribute__((vector_size(32)));
AF_INLINE Pairs low_products(Pairs a, Pairs b) { return Pairs(_mm256_mul_epu32(__m256i(a), __m256i(b))); }
#else
using Pairs = uint64_t __attribute__((vector_size(16)));
AF_INLINE Pairs low_products(Pairs a, Pairs b) { return Pairs(_mm_mul_epu32(__m128i(a), __m128i(b))); }
#endif
#else
using Pairs = uint64_t __attribute__((vector_size(8)));
AF_INLINE Pairs low_products(Pairs a, Pairs b) { return (a & 0xffffffffu) * (b & 0xffffffffu); }
#endif

// Draws the noise of a chunk's elements in their order.
class Draw {
 public:
  explicit Draw(const Noise& noise) : odd(noise.odd) {
    for (uint32_t k = 0; k < kPairs; ++k) position[k] = noise.position(k);
  }

  // Of the next n elements, an even number but for the last ones; returns where that of the first is in `tile`.
  const uint32_t* next(int64_t n, uint32_t* __restrict tile) {
    Pairs at = position;
#pragma GCC unroll 4
    for (int64_t i = 0; i < n + odd; i += 2 * kPairs, at += kPairs * Noise::kStride) {
      const Pairs bits = Noise::at(at, low_products);
      memcpy(tile + i, &bits, sizeof bits);
    }
    position += uint64_t(n / 2) * Noise::kStride;
    return tile + odd;
  }

 private:
  static constexpr int64_t kPairs = sizeof(Pairs) / 8;
  const int64_t odd;
  Pairs position;
};

// ---- step -----------------------------------------------------------------------------------------------------------

template <class Rule>
void step_formatted(const Rule& rule, const Row& row, int64_t index, const Operands& in, int64_t count, int64_t offset,
                    int64_t n) {
  Draw noise(Noise(row, index, count, offset));
  const bool plain_states = row.states == States::kFloat32;
  Tile tile;
  for (int64_t first = 0; first < n; first += kTile) {
    const int64_t at = offset + first, length = smaller(kTile, n - first);
    kLoadWeights[int(row.weights)](row, at, length, tile.param);
    float* state[kMaxStates];
    for_each_state<Rule>([&](auto k) {
      state[k] = plain_states ? static_cast<float*>(row.state[k]) + at : tile.state[k];
      if (!plain_states) load_state<k, k >= Rule::kFirstSecondMoment>(row, at, length, state[k]);
    });
    const auto run = [&](const auto* grad) {
      if (plain_states) update<Rule, true>(rule, tile.param, grad, state, int(length), kAllStates<Rule>);
      else update<Rule, false>(rule, tile.param, grad, state, int(length), kAllStates<Rule>);
    };
    if constexpr (Rule::kIsCommon) with_grad(in, at, run);
    else run(fp32_grad(in, at, length, tile.grad));
    // While the last roots and divisions run.
    const uint32_t* const bits = row.seed ? noise.next(length, tile.noise) : tile.noise;
    kStoreWeights[int(row.weights)](row, at, length, tile.param, bits);
    for_each_state<Rule>([&](auto k) {
      if (!plain_states) store_state<k, k >= Rule::kFirstSecondMoment>(row, at, length, state[k], bits);
    });
  }
}

}  // namespace
}  // namespace accumfused::AF_TARGET
