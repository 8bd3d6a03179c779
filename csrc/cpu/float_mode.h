// IEEE arithmetic for the duration of a scope, whatever the calling thread's mode: round to nearest, subnormals kept.
// torch.set_flush_denormal(True) reaches the calling thread only, so results would depend on the number of threads.
#pragma once
#include <cstdint>
#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace accumfused::AF_TARGET {
namespace {

class FloatMode {
 public:
  FloatMode() : saved_(read()) { write(kIeee); }
  ~FloatMode() { write(saved_); }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
#if defined(__SSE2__)
  using Word = uint32_t;
  static constexpr Word kIeee = 0x1f80;  // MXCSR at reset
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kIeee = 0;  // FPCR at reset
  static Word read() {
    Word word;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { __asm__ __volatile__("msr fpcr, %0" ::"r"(word)); }
#else
  using Word = int;
  static constexpr Word kIeee = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif
  Word saved_;
};

}  // namespace
}  // namespace accumfused::AF_TARGET
