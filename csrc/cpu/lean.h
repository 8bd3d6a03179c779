// The step of a parameter in 16 bits with states in blocks of 8: the one whose arithmetic, not its memory, would be the
// limit in tiles of fp32. The same bits as one by one in codecs.h, four vectors at a time: vector k has the elements
// 4j + k. So a word of codes has one of each vector, and nothing needs unpacking: a shift brings a code's bits to where
// a float's are, and a mask drops its neighbours.
#pragma once
#include "../codecs.h"
#include "vector.h"

namespace accumfused::AF_TARGET {
namespace {

constexpr int64_t kGroup = 4 * kWidth;
constexpr int kBlockGroups = int(kBlock / kGroup), kTileBlocks = 4;

using Four = Floats[4];

// Numbers of 16 bits: of vectors 0 and 1, and of vectors 2 and 3.
struct Pairs {
  Words first, second;
};

AF_INLINE Pairs load_pairs(const void* from) {
  const Words a = load_words(from), b = load_words(static_cast<const Words*>(from) + 1);
  return {even(a, b), odd(a, b)};
}

AF_INLINE void store_pairs(void* to, const Pairs& pairs) {
  store_words(to, first_in_turn(pairs.first, pairs.second));
  store_words(static_cast<Words*>(to) + 1, second_in_turn(pairs.first, pairs.second));
}

AF_INLINE Words high_halves(Words first, Words second) { return select<0xffff0000u>(second, first >> 16); }
AF_INLINE Words low_halves(Words first, Words second) { return select<0xffff0000u>(second << 16, first); }

AF_INLINE void load_grad(const Bfloat16* from, Four& grad) {
  const Pairs pairs = load_pairs(from);
  grad[0] = Floats(pairs.first << 16), grad[1] = Floats(pairs.first & 0xffff0000u);
  grad[2] = Floats(pairs.second << 16), grad[3] = Floats(pairs.second & 0xffff0000u);
}

AF_INLINE void load_grad(const float* from, Four& grad) {
  const auto at = [from](int k) { return Floats(load_words(from + k * kWidth)); };
  const Floats even_first = even(at(0), at(1)), even_second = even(at(2), at(3));
  const Floats odd_first = odd(at(0), at(1)), odd_second = odd(at(2), at(3));
  grad[0] = even(even_first, even_second), grad[1] = even(odd_first, odd_second);
  grad[2] = odd(even_first, even_second), grad[3] = odd(odd_first, odd_second);
}

// ---- weights --------------------------------------------------------------------------------------------------------
// Remainders are taken with their sign turned: then they are what the lower bits are after adding 0x8000, which rounds.

template <class W>
struct Packed;

AF_INLINE Floats joined(Words high, Words low) { return Floats(select<0xffff0000u>(high, low) - 0x8000u); }

template <>
struct Packed<Split16Weights> {
  using Master = Pairs;
  AF_INLINE Master load(const int16_t* from) { return load_pairs(from); }
  AF_INLINE void store(int16_t* to, const Master& master) { store_pairs(to, master); }
  AF_INLINE void join(const Pairs& param, const Master& master, Four& p) {
    const Words first = master.first ^ 0x80008000u, second = master.second ^ 0x80008000u;
    p[0] = joined(param.first << 16, first), p[1] = joined(param.first, first >> 16);
    p[2] = joined(param.second << 16, second), p[3] = joined(param.second, second >> 16);
  }
  AF_INLINE void split(const Four& p, const Words (&)[4], Pairs& param, Master& master) {
    Words y[4];
    for (int k = 0; k < 4; ++k) y[k] = Words(p[k]) + 0x8000u;
    param = {high_halves(y[0], y[1]), high_halves(y[2], y[3])};
    master = {low_halves(Words(p[0]), Words(p[1])), low_halves(Words(p[2]), Words(p[3]))};
  }
};

template <>
struct Packed<Split8Weights> {
  using Master = Words;
  AF_INLINE Master load(const int8_t* from) { return load_words(from); }
  AF_INLINE void store(int8_t* to, const Master& master) { store_words(to, master); }
  AF_INLINE void join(const Pairs& param, const Master& master, Four& p) {
    const Words turned = master ^ 0x80808080u, even = turned & 0x00ff00ffu, odd = turned & 0xff00ff00u;
    p[0] = joined(param.first << 16, even << 8), p[1] = joined(param.first, odd);
    p[2] = joined(param.second << 16, even >> 8), p[3] = joined(param.second, odd >> 16);
  }
  AF_INLINE void split(const Four& p, const Words (&noise)[4], Pairs& param, Master& master) {
    Words y[4];
    for (int k = 0; k < 4; ++k) y[k] = Words(p[k]) + (leading<kWeightStream, 8>(noise[k]) | all(0x8000u));
    param = {high_halves(y[0], y[1]), high_halves(y[2], y[3])};
    const Words even = low_halves(y[0], y[2]) >> 8, odd = low_halves(y[1], y[3]);
    master = select<0x00ff00ffu>(even, odd) ^ 0x80808080u;
  }
};

// ---- moments --------------------------------------------------------------------------------------------------------

template <int kLeft>
AF_INLINE Words shifted(Words words) {
  if constexpr (kLeft >= 0) return words << kLeft;
  else return words >> -kLeft;
}

template <bool kSecondMoment, int k>
AF_INLINE Floats decode_byte(Words codes, float factor) {
  constexpr uint32_t kBase = kSecondMoment ? kUnsignedBase : kSignedBase;
  constexpr uint32_t kMask = kSecondMoment ? 0xffu : 0x7fu;
  const Words bits = select<(kMask << kCodeShift)>(shifted<kCodeShift - 8 * k>(codes), all(kBase));
  const Floats value = exact_fma(Floats(bits), all(factor), all(factor * -float_from_bits(kBase)));
  if constexpr (kSecondMoment) return value;
  else return Floats((shifted<24 - 8 * k>(codes) & all(0x80000000u)) | Words(value));
}

template <bool kSecondMoment>
AF_INLINE void decode_bytes(Words codes, float factor, Four& values) {
  values[0] = decode_byte<kSecondMoment, 0>(codes, factor), values[1] = decode_byte<kSecondMoment, 1>(codes, factor);
  values[2] = decode_byte<kSecondMoment, 2>(codes, factor), values[3] = decode_byte<kSecondMoment, 3>(codes, factor);
}

AF_INLINE Words encode_first(const Floats* m, float inverse, const Words* noise) {
  Words x[4];
  for (int k = 0; k < 4; ++k) {
    const Floats base = Floats(select<0x80000000u>(Words(m[k]), all(kSignedBase)));
    x[k] = Words(exact_fma(m[k], all(inverse), base)) + leading<0, kCodeShift>(noise[k]);
  }
  const Words even = high_halves(x[0], x[2]), odd = high_halves(x[1], x[3]);
  return select<0x00ff00ffu>(select<0x007f007fu>(even >> 3, even >> 8), select<0x7f007f00u>(odd << 5, odd));
}

AF_INLINE Words encode_second(const Floats* v, float inverse, const Words* noise) {
  Words x[4];
  for (int k = 0; k < 4; ++k) {
    const Floats base = all(float_from_bits(kUnsignedBase));
    x[k] = Words(exact_fma(v[k], all(inverse), base)) + leading<1, kCodeShift>(noise[k]);
  }
  const Words even = high_halves(x[0], x[2]), odd = high_halves(x[1], x[3]);
  const Bytes codes = Bytes(select<0x00ff00ffu>(even >> 3, odd << 5)), least = Bytes{} + uint8_t(kMinSecondMoment);
  return Words(codes > least ? codes : least);
}

// ---- step -----------------------------------------------------------------------------------------------------------

// Where a row's blocks lie, from one element on.
template <class W, class G>
struct Stored {
  const G* grad;
  typename W::Param* param;
  typename W::Master* master;
  uint8_t *m_codes, *v_codes, *m_scale, *v_scale;

  Stored(const Row& row, const G* grad, int64_t at)
      : grad(grad),
        param(static_cast<typename W::Param*>(row.param) + at),
        master(static_cast<typename W::Master*>(row.master) + at),
        m_codes(static_cast<uint8_t*>(row.state[0]) + at),
        v_codes(static_cast<uint8_t*>(row.state[1]) + at),
        m_scale(row.scale[0] + at / kBlock),
        v_scale(row.scale[1] + at / kBlock) {}
};

// What a block becomes; written when it is known that all of it is finite.
template <class W>
struct NewBlock {
  Four m[kBlockGroups], v[kBlockGroups];
  Words noise[kBlockGroups][4];
  Pairs param[kBlockGroups];
  typename Packed<W>::Master master[kBlockGroups];
  uint32_t m_scale, v_scale;
};

template <class W, class Rule, class G>
AF_INLINE void update_block(const Rule& rule, const Noise& noise, Words& position, const Stored<W, G>& from, int64_t i,
                            NewBlock<W>& to) {
  const float m_factor = scale_factor(from.m_scale[i / kBlock]), v_factor = scale_factor(from.v_scale[i / kBlock]);
  Floats m_largest = {}, v_largest = {}, sum = {};
  for (int g = 0; g < kBlockGroups; ++g, i += kGroup, position += all(uint32_t(kGroup) * Noise::kStride)) {
    Four p, grad, m, v;
    Words bits[4];
    Packed<W>::join(load_pairs(from.param + i), Packed<W>::load(from.master + i), p);
    load_grad(from.grad + i, grad);
    decode_bytes<false>(load_words(from.m_codes + i), m_factor, m);
    decode_bytes<true>(load_words(from.v_codes + i), v_factor, v);
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      Floats unused;
      rule(p[k], grad[k], m[k], v[k], unused);
      m_largest = larger_magnitude(m_largest, m[k]), v_largest = larger(v_largest, v[k]);
      sum += p[k];
      bits[k] = noise.at(position + all(uint32_t(k) * Noise::kStride));
      to.m[g][k] = m[k], to.v[g][k] = v[k], to.noise[g][k] = bits[k];
    }
    Packed<W>::split(p, bits, to.param[g], to.master[g]);
  }
  // A NaN moment makes a NaN of its parameter. Comparisons lose a NaN: infinity takes its place.
  float m_most, v_most;
  v_largest = larger(v_largest, Floats(Words(sum - sum) & 0x7f800000u));
  largest(m_largest, v_largest, m_most, v_most);
  to.m_scale = scale_of(bits_of(m_most)), to.v_scale = scale_of(bits_of(v_most));
}

template <class W, class G>
AF_INLINE void store_block(const NewBlock<W>& from, const Stored<W, G>& to, int64_t i) {
  to.m_scale[i / kBlock] = uint8_t(from.m_scale), to.v_scale[i / kBlock] = uint8_t(from.v_scale);
  const float m_inverse = inverse_scale(from.m_scale), v_inverse = inverse_scale(from.v_scale);
  for (int g = 0; g < kBlockGroups; ++g, i += kGroup) {
    store_pairs(to.param + i, from.param[g]);
    Packed<W>::store(to.master + i, from.master[g]);
    store_words(to.m_codes + i, encode_first(from.m[g], m_inverse, from.noise[g]));
    store_words(to.v_codes + i, encode_second(from.v[g], v_inverse, from.noise[g]));
  }
}

// Whole blocks, several at a time: while the largest moments of one are found, the next is worked on. n elements from
// `at` on, the first of them the noise's `first`; returns how many are done: up to blocks of which not all is finite.
template <class W, class Rule, class G>
int64_t step_blocks(const Rule& rule, const Row& row, const Noise& noise, const G* grad, int64_t at, int64_t first,
                    int64_t n) {
  const Stored<W, G> stored(row, grad, at);
  Words position;
  for (int j = 0; j < kWidth; ++j) position[j] = noise.position(uint32_t(first + 4 * j));
  NewBlock<W> blocks[kTileBlocks];
  int64_t done = 0;
  while (n - done >= kBlock) {
    const int64_t end = done + smaller(kTileBlocks, (n - done) / kBlock) * kBlock;
    uint32_t largest_scale = 0;
    NewBlock<W>* block = blocks;
    for (int64_t i = done; i < end; i += kBlock, ++block) {
      update_block(rule, noise, position, stored, i, *block);
      largest_scale = larger(largest_scale, larger(block->m_scale, block->v_scale));
    }
    if (largest_scale == 255) break;
    for (block = blocks; done < end; done += kBlock, ++block) store_block(*block, stored, done);
  }
  return done;
}

}  // namespace
}  // namespace accumfused::AF_TARGET
