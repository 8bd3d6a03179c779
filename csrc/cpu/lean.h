// The step of a parameter in 16 bits with states in blocks of 8: the one whose arithmetic, not its memory, would be the
// limit in tiles. A block goes from end to end in registers, through the same codecs and rules.
#pragma once
#include "../codecs.h"
#include "vector.h"

namespace accumfused::AF_TARGET {
namespace {

// Whole blocks; returns how many elements they are. n elements from `at` on.
template <class W, class Rule, class G>
int64_t step_blocks(const Rule& rule, const Row& row, const Noise& noise, const G* grad, int64_t at, int64_t first,
                    int64_t n) {
  constexpr int kVectors = int(kBlock) / kWidth;
  auto* param = &static_cast<typename W::Param*>(row.param)->bits + at;
  auto* master = static_cast<typename W::Master*>(row.master) + at;
  auto* m_codes = static_cast<uint8_t*>(row.state[0]) + at;
  auto* v_codes = static_cast<uint8_t*>(row.state[1]) + at;
  uint8_t *m_scale = row.scale[0] + at / kBlock, *v_scale = row.scale[1] + at / kBlock;
  Words position;
  for (int k = 0; k < kWidth; ++k) position[k] = noise.position(uint32_t(first + k));
  int64_t i = 0;
  for (; i + kBlock <= n; i += kBlock) {
    const float m_factor = scale_factor(*m_scale), v_factor = scale_factor(*v_scale);
    Floats m[kVectors], v[kVectors];
    Words bits[kVectors], m_largest = {}, v_largest = {};
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k, position += kWidth * Noise::kStride) {
      const int64_t j = i + k * kWidth;
      bits[k] = noise.at(position);
      m[k] = decode<false>(load(m_codes + j), m_factor);
      v[k] = decode<true>(load(v_codes + j), v_factor);
      Floats p = W::from_bits(load(param + j), load(master + j)), unused;
      rule(p, load_grad(grad + j), m[k], v[k], unused);
      m_largest = larger(m_largest, bits_of(magnitude(m[k])));
      v_largest = larger(v_largest, bits_of(v[k]));
      Words high, low;
      W::to_bits(p, stream<kWeightStream>(bits[k]), high, low);
      store(param + j, high);
      store(master + j, low);
    }
    const uint32_t m_exponent = scale_of(largest(m_largest)), v_exponent = scale_of(largest(v_largest));
    *m_scale++ = uint8_t(m_exponent), *v_scale++ = uint8_t(v_exponent);
    const float m_inverse = inverse_scale(m_exponent), v_inverse = inverse_scale(v_exponent);
#pragma GCC unroll 8
    for (int k = 0; k < kVectors; ++k) {
      const int64_t j = i + k * kWidth;
      store(m_codes + j, encode<false>(m[k], m_inverse, bits[k]));
      store(v_codes + j, encode<true>(v[k], v_inverse, stream<1>(bits[k])));
    }
  }
  return i;
}

}  // namespace
}  // namespace accumfused::AF_TARGET
