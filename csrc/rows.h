// What the kernels work on: one row per parameter, in the optimizer's order, and what one call brings to it. No Python,
// no torch. The Triton kernels read the same bytes as words of 64 bits: see accumfused/backends/triton.py.
#pragma once
#include <cstdint>

#include "target.h"

namespace accumfused {

// A chunk is a fixed-length piece of one tensor: the unit of work, and of the norm's summation order. Both numbers are
// part of the arithmetic: every backend reads them from here (`_C.CHUNK`, `_C.LANES`) or is tested against them.
constexpr int64_t kChunk = 32768;
constexpr int64_t kLanes = 1024;
constexpr int kMaxStates = 3;

enum class Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

constexpr int32_t kOverwrite = -1;  // in place of a weight's index: the accumulator holds nothing yet

// The parameter, its states and its place in the order of chunks: what lasts from call to call.
struct Row {
  float* param = nullptr;
  float* state[kMaxStates] = {};
  float* step = nullptr;  // null: the rule counts no steps
  int64_t numel = 0;
  int64_t first_chunk = 0;
  int64_t group = 0;
};

// What changes with every call.
struct Operands {
  const void* grad = nullptr;    // null: no gradient in this call
  float* accumulator = nullptr;  // null: not folded in this call
  int32_t weight = kOverwrite;   // of what the accumulator holds: an index into the window's weights
  Dtype grad_dtype = Dtype::kFloat32;
};

static_assert(sizeof(Row) == 64 && sizeof(Operands) == 24, "the Triton kernels know these");

struct Rows {
  const Row* rows;
  const Operands* operands;
  int64_t count;
  int64_t chunks;  // over all rows
};

AF_INLINE int64_t chunk_count(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

// The row that a chunk belongs to: the last one whose first chunk is not behind it. Rows without elements have none.
AF_INLINE int64_t row_of(const Row* rows, int64_t count, int64_t chunk) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (rows[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

}  // namespace accumfused
