// Vectors of as many floats as a register of the instruction set holds (GCC's and Clang's vector types), where a loop
// must stay in registers from end to end: the compiler's own vectorising keeps to one loop at a time.
#pragma once
#include <utility>

#include "../numeric.h"
#if defined(__SSE2__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 finds it in its own header (bug 105593)
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

namespace accumfused::AF_TARGET {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(kWidth * sizeof(T))));
};
template <class T>
using Vector = typename VectorOf<T>::type;
using Floats = Vector<float>;
using Words = Vector<uint32_t>;
typedef uint8_t Bytes __attribute__((vector_size(sizeof(Words))));

AF_INLINE Words all(uint32_t word) { return Words{} + word; }
AF_INLINE Floats all(float value) { return value - Floats{}; }
AF_INLINE Words bits_of(Floats values) { return Words(values); }
AF_INLINE Floats float_from_bits(Words bits) { return Floats(bits); }
AF_INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

AF_INLINE Words load_words(const void* from) {
  Words words;
  memcpy(&words, from, sizeof words);
  return words;
}
AF_INLINE void store_words(void* to, Words words) { memcpy(to, &words, sizeof words); }

// The bits of `a` where the mask has ones, those of `b` elsewhere.
template <uint32_t kMask>
AF_INLINE Words select(Words a, Words b) {
#if defined(__AVX512F__)  // one instruction, by the truth table
  return Words(_mm512_ternarylogic_epi32(__m512i(all(kMask)), __m512i(a), __m512i(b), 0xca));
#elif defined(__AVX2__)
  if constexpr (kMask == 0xffff0000u) return Words(_mm256_blend_epi16(__m256i(b), __m256i(a), 0xaa));
#endif
  return (a & kMask) | (b & ~kMask);
}

AF_INLINE Words exclusive_or(Words a, Words b, Words c) {
#if defined(__AVX512F__)
  return Words(_mm512_ternarylogic_epi32(__m512i(a), __m512i(b), __m512i(c), 0x96));
#else
  return a ^ b ^ c;
#endif
}

// Of the magnitudes.
AF_INLINE Floats larger_magnitude(Floats a, Floats b) {
#if defined(__AVX512DQ__)
  return _mm512_range_ps(a, b, 0xb);
#else
  return larger(a, Floats(Words(b) & 0x7fffffffu));
#endif
}

// Where the product is exact, or so small beside the sum that it changes no bit of it: one rounding gives what two do.
AF_INLINE Floats exact_fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

AF_INLINE Floats square_root(Floats values) {
#if defined(__AVX512F__)
  return _mm512_sqrt_ps(values);
#elif defined(__AVX2__)
  return _mm256_sqrt_ps(values);
#elif defined(__SSE2__)
  return _mm_sqrt_ps(values);
#else
  for (int k = 0; k < kWidth; ++k) values[k] = square_root(values[k]);
  return values;
#endif
}

// ---- order ----------------------------------------------------------------------------------------------------------

template <class T, int... k>
AF_INLINE T taken(T a, T b, std::integer_sequence<int, k...>) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, k...);
#else
  return __builtin_shuffle(a, b, Vector<int32_t>{k...});
#endif
}

template <int kFirst, int kStep, class T, int... k>
AF_INLINE T each(T a, T b, std::integer_sequence<int, k...>) {
  return taken(a, b, std::integer_sequence<int, (kFirst + kStep * k)...>());
}
template <int kFirst, class T, int... k>
AF_INLINE T in_turn(T a, T b, std::integer_sequence<int, k...>) {
  return taken(a, b, std::integer_sequence<int, (kFirst + k / 2 + k % 2 * kWidth)...>());
}
using Lanes = std::make_integer_sequence<int, kWidth>;

// Every other number of `a` and `b`, and back.
template <class T>
AF_INLINE T even(T a, T b) {
  return each<0, 2>(a, b, Lanes());
}
template <class T>
AF_INLINE T odd(T a, T b) {
  return each<1, 2>(a, b, Lanes());
}
AF_INLINE Words first_in_turn(Words a, Words b) { return in_turn<0>(a, b, Lanes()); }
AF_INLINE Words second_in_turn(Words a, Words b) { return in_turn<kWidth / 2>(a, b, Lanes()); }

// The largest number of each.
AF_INLINE void largest(Floats a, Floats b, float& of_a, float& of_b) {
  Floats both = larger(even(a, b), odd(a, b));  // halves: of a, and of b
  for (int width = kWidth / 2; width > 1; width /= 2) both = larger(even(both, both), odd(both, both));
  of_a = both[0], of_b = both[1];
}

}  // namespace accumfused::AF_TARGET
