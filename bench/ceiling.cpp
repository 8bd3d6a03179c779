// What memory gives for each mix of reads and writes: streaming loops with next to no arithmetic. ceilings.py compiles
// this file for the machine it runs on (-march=native) and keeps the fastest loop of each mix.
//
// A mix has up to four streams of n elements. Its loops differ in how the threads share the work and in software
// prefetch: which one is the fastest depends on the processor, and on how busy its memory is.
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kPiece = 32768;
constexpr int64_t kBlock = 16;  // elements: one cache line of fp32; with 64, the sums of `Read` leave the registers

// How a loop prefetches: not at all, a little ahead into the first-level cache, or far ahead into the second.
enum class Prefetch { kNone, kNear, kFar };

template <Prefetch kPrefetch>
void fetch(const void* address) {
  const char* const byte = static_cast<const char*>(address);
  if constexpr (kPrefetch == Prefetch::kNear) __builtin_prefetch(byte + 4096, 0, 3);
  if constexpr (kPrefetch == Prefetch::kFar) __builtin_prefetch(byte + 32768, 0, 2);
}

float widen(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return uint16_t(bits >> 16);
}

// Copies one block that will not be read again past the caches.
void stream(void* to, const void* from, int64_t bytes) {
#if defined(__AVX512F__)
  if (bytes % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(to) + i),
                          _mm512_load_si512(static_cast<const char*>(from) + i));
    }
    return;
  }
#endif
#if defined(__SSE2__)
  for (int64_t i = 0; i < bytes; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(to) + i),
                     _mm_load_si128(reinterpret_cast<const __m128i*>(static_cast<const char*>(from) + i)));
  }
#else
  memcpy(to, from, bytes);
#endif
}

struct Streams {
  float* a;
  float* b;
  float* c;
  float* d;  // 16-bit where the mix says so
};

const uint16_t* halves(const Streams& s) { return reinterpret_cast<const uint16_t*>(s.d); }

// Each mix: what happens to elements i..i + kBlock, and what it reads: the first kStates of a, b and c, and of d
// elements of so many bytes.
template <int kStatesRead, int kBytesOfD>
struct Reads {
  static constexpr int kStates = kStatesRead;
  static constexpr int64_t kBytes = kBytesOfD;
  float result() const { return 0; }
};

struct Read : Reads<0, 4> {
  float lanes[kBlock] = {};
  void block(const Streams& s, int64_t i) {
    for (int64_t k = 0; k < kBlock; ++k) lanes[k] += s.d[i + k] * s.d[i + k];
  }
  float result() const {
    float sum = 0;
    for (const float lane : lanes) sum += lane;
    return sum;
  }
};

struct Scale : Reads<1, 0> {
  void block(const Streams& s, int64_t i) {
    for (int64_t k = 0; k < kBlock; ++k) s.a[i + k] = -s.a[i + k];
  }
};

struct Accumulate : Reads<1, 4> {
  void block(const Streams& s, int64_t i) {
    for (int64_t k = 0; k < kBlock; ++k) s.a[i + k] = s.a[i + k] * 0.5f + s.d[i + k];
  }
};

struct AccumulateBf16 : Reads<1, 2> {
  void block(const Streams& s, int64_t i) {
    const uint16_t* half = halves(s);
    for (int64_t k = 0; k < kBlock; ++k) s.a[i + k] = s.a[i + k] * 0.5f + widen(half[i + k]);
  }
};

struct OverwriteBf16 : Reads<0, 2> {
  void block(const Streams& s, int64_t i) {
    const uint16_t* half = halves(s);
    alignas(64) float block[kBlock];
    for (int64_t k = 0; k < kBlock; ++k) block[k] = widen(half[i + k]);
    stream(s.a + i, block, sizeof block);
  }
};

// Sums in two bytes: here in a.
struct AccumulateInBf16 : Reads<0, 2> {
  void block(const Streams& s, int64_t i) {
    const uint16_t* half = halves(s);
    uint16_t* const sums = reinterpret_cast<uint16_t*>(s.a);
    for (int64_t k = 0; k < kBlock; ++k) sums[i + k] = narrow(widen(sums[i + k]) * 0.5f + widen(half[i + k]));
  }
};

struct CopyBf16 : Reads<0, 2> {
  void block(const Streams& s, int64_t i) {
    stream(reinterpret_cast<uint16_t*>(s.a) + i, halves(s) + i, 2 * kBlock);
  }
};

struct Narrow : Reads<0, 4> {
  void block(const Streams& s, int64_t i) {
    alignas(64) uint16_t block[kBlock];
    for (int64_t k = 0; k < kBlock; ++k) block[k] = narrow(s.d[i + k]);
    stream(reinterpret_cast<uint16_t*>(s.a) + i, block, sizeof block);
  }
};

template <bool kRewritesD>
struct Step : Reads<3, 4> {
  void block(const Streams& s, int64_t i) {
    for (int64_t k = 0; k < kBlock; ++k) {
      const float d = s.d[i + k];
      s.a[i + k] = s.a[i + k] * 0.5f + d;
      s.b[i + k] = s.b[i + k] * 0.5f + d;
      s.c[i + k] = s.c[i + k] * 0.5f + d;
      if constexpr (kRewritesD) s.d[i + k] = -d;
    }
  }
};

// Past the end a prefetch does nothing.
template <Prefetch kPrefetch, class Mix>
void ahead(const Streams& s, int64_t i) {
  if constexpr (Mix::kStates > 0) fetch<kPrefetch>(s.a + i);
  if constexpr (Mix::kStates > 1) fetch<kPrefetch>(s.b + i);
  if constexpr (Mix::kStates > 2) fetch<kPrefetch>(s.c + i);
  if constexpr (Mix::kBytes == 2) fetch<kPrefetch>(halves(s) + i);
  if constexpr (Mix::kBytes == 4) fetch<kPrefetch>(s.d + i);
}

template <Prefetch kPrefetch, class Mix>
void range(Mix& mix, const Streams& streams, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i += kBlock) {
    ahead<kPrefetch, Mix>(streams, i);
    mix.block(streams, i);
  }
}

// Inside a parallel region: one contiguous range per thread, or pieces handed out one by one.
template <Prefetch kPrefetch, class Mix>
void ranges(Mix& mix, const Streams& streams, int64_t n) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < n; i += kPiece) range<kPrefetch>(mix, streams, i, i + kPiece);
}

template <Prefetch kPrefetch, class Mix>
void pieces(Mix& mix, const Streams& streams, int64_t n) {
#pragma omp for schedule(dynamic, 16)
  for (int64_t i = 0; i < n; i += kPiece) range<kPrefetch>(mix, streams, i, i + kPiece);
}

// n is a multiple of kPiece.
template <class Mix>
float run(int loop, const Streams& streams, int64_t n, int threads) {
  float total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  {
    Mix mix;
    switch (loop) {
      case 0: ranges<Prefetch::kNone>(mix, streams, n); break;
      case 1: pieces<Prefetch::kNone>(mix, streams, n); break;
      case 2: pieces<Prefetch::kNear>(mix, streams, n); break;
      default: pieces<Prefetch::kFar>(mix, streams, n);
    }
    total += mix.result();
  }
  return total;
}

}  // namespace

extern "C" {

int loops() { return 4; }

#define MIX(name, Mix)                                                                   \
  float name(int loop, int64_t n, int threads, float* a, float* b, float* c, float* d) { \
    return run<Mix>(loop, {a, b, c, d}, n, threads);                                     \
  }

MIX(read, Read)
MIX(scale, Scale)
MIX(accumulate, Accumulate)
MIX(accumulate_bf16, AccumulateBf16)
MIX(overwrite_bf16, OverwriteBf16)
MIX(accumulate_in_bf16, AccumulateInBf16)
MIX(copy_bf16, CopyBf16)
MIX(narrow_bf16, Narrow)
MIX(step, Step<false>)
MIX(step_rewriting_grad, Step<true>)
}
