// Vectors of as many floats as a register of the instruction set holds (GCC's and Clang's vector types), where a loop
// must stay in registers from end to end: the compiler's own vectorising keeps to one loop at a time.
#pragma once
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

AF_INLINE Words bits_of(Floats values) { return Words(values); }
AF_INLINE Floats float_from_bits(Words bits) { return Floats(bits); }
AF_INLINE Floats magnitude(Floats values) { return Floats(Words(values) & 0x7fffffffu); }
AF_INLINE Words larger(Words a, Words b) { return a > b ? a : b; }

#if defined(__AVX512F__)  // three operands in one instruction, by the truth table
AF_INLINE Words select(Words mask, Words a, Words b) {
  return Words(_mm512_ternarylogic_epi32(__m512i(mask), __m512i(a), __m512i(b), 0xca));
}
AF_INLINE Words exclusive_or(Words a, Words b, Words c) {
  return Words(_mm512_ternarylogic_epi32(__m512i(a), __m512i(b), __m512i(c), 0x96));
}
#else
AF_INLINE Words select(Words mask, Words a, Words b) { return (a & mask) | (b & ~mask); }
AF_INLINE Words exclusive_or(Words a, Words b, Words c) { return a ^ b ^ c; }
#endif

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

AF_INLINE uint32_t largest(Words values) {
  uint32_t result = values[0];
  for (int k = 1; k < kWidth; ++k) result = values[k] > result ? values[k] : result;
  return result;
}

// Numbers of 8 and 16 bits as 32-bit words, with their sign if they have one, and the words' lowest bits; what the
// compiler makes of a conversion between vector types is no single instruction.
template <class T>
AF_INLINE Words load(const T* from) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 1) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return Words(T(-1) < 0 ? _mm512_cvtepi8_epi32(values) : _mm512_cvtepu8_epi32(values));
  } else {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return Words(T(-1) < 0 ? _mm512_cvtepi16_epi32(values) : _mm512_cvtepu16_epi32(values));
  }
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 1) {
    const __m128i values = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return Words(T(-1) < 0 ? _mm256_cvtepi8_epi32(values) : _mm256_cvtepu8_epi32(values));
  } else {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return Words(T(-1) < 0 ? _mm256_cvtepi16_epi32(values) : _mm256_cvtepu16_epi32(values));
  }
#else
  Vector<T> values;
  memcpy(&values, from, sizeof values);
  return __builtin_convertvector(values, Words);
#endif
}

template <class T>
AF_INLINE void store(T* to, Words words) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 1) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(__m512i(words)));
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(__m512i(words)));
  }
#elif defined(__AVX2__)
  const __m256i low = __m256i(words & (sizeof(T) == 1 ? 0xffu : 0xffffu));
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  if constexpr (sizeof(T) == 1) {
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
  } else {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
  }
#else
  const Vector<T> values = __builtin_convertvector(words, Vector<T>);
  memcpy(to, &values, sizeof values);
#endif
}

AF_INLINE Floats load_grad(const float* from) {
  Floats values;
  memcpy(&values, from, sizeof values);
  return values;
}
AF_INLINE Floats load_grad(const Bfloat16* from) { return Floats(load(&from->bits) << 16); }

}  // namespace accumfused::AF_TARGET
