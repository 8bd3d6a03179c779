// Overwriting a sum with a gradient. Ordinary stores first read the line that they are about to overwrite;
// beyond the caches non-temporal ones save that (10 -> 6 bytes an element for a 16-bit gradient). Compilers emit none
// on their own.
#pragma once
#include "../codecs.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace accumfused::AF_TARGET {
namespace {

constexpr int64_t kStreamBytes = 8 << 20;  // past the second-level caches of two to eight cores

template <class G>
void overwrite(Bfloat16* __restrict sum, const G* __restrict grad, int64_t n, bool) {
  for (int64_t i = 0; i < n; ++i) sum[i] = to_bfloat16(to_float(grad[i]));  // of bf16: exact
}

template <class G>
void overwrite(float* __restrict sum, const G* __restrict grad, int64_t n, [[maybe_unused]] bool beyond_cache) {
  int64_t i = 0;
#if defined(__SSE2__)
  if (beyond_cache && reinterpret_cast<uintptr_t>(sum) % 16 == 0) {
    constexpr int64_t kPiece = 256;  // converted in the L1 cache by vectorised code, then streamed out
    alignas(64) float piece[kPiece];
    for (; i + kPiece <= n; i += kPiece) {
      for (int64_t k = 0; k < kPiece; ++k) piece[k] = to_float(grad[i + k]);
      for (int64_t k = 0; k < kPiece; k += 4) _mm_stream_ps(sum + i + k, _mm_load_ps(piece + k));
    }
    _mm_sfence();
  }
#endif
  for (; i < n; ++i) sum[i] = to_float(grad[i]);
}

}  // namespace
}  // namespace accumfused::AF_TARGET
