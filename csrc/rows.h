// What the kernels work on: one row per parameter, in the optimizer's order, and what one call brings to it. No Python,
// no torch.
#pragma once
#include <cstdint>

#include "target.h"

namespace accumfused {

// A chunk is a fixed-length piece of one tensor: the unit of work, and of the norm's summation order. Both numbers are
// part of the arithmetic: every backend reads them from here (`_C.CHUNK`, `_C.LANES`) or is tested against them.
constexpr int64_t kChunk = 32768;
constexpr int64_t kLanes = 1024;
constexpr int kMaxStates = 3;

// States in 8 bits: so many elements share a scale (a warp's 32 threads hold four each), the smallest code of a second
// moment, and the smallest biased exponent of a scale that is not 0.
constexpr int64_t kBlock = 128;
constexpr int kMinSecondMoment = 4;
constexpr int kSmallestScale = 33;

enum class Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

// How a parameter is kept, and how its states are: see accumfused/formats/kinds.py.
enum class Weights : int32_t {
  kFloat32 = 0,
  kBfloat16,
  kBfloat16Stochastic,
  kFloat16,
  kFloat16Stochastic,
  kBfloat16Split16,
  kBfloat16Split8,
  kBfloat16Master,
  kFloat16Master,
};
enum class States : int32_t { kFloat32 = 0, kBfloat16, kInt8 };

constexpr int32_t kOverwrite = -1;  // in place of a weight's index: the accumulator holds nothing yet

// The parameter, its states and its place in the order of chunks: what lasts from call to call.
struct Row {
  void* param = nullptr;
  float* step = nullptr;          // null: none is counted
  const int64_t* seed = nullptr;  // null: nothing is rounded stochastically
  void* master = nullptr;         // what the parameter lacks of its fp32 value
  void* state[kMaxStates] = {};
  uint8_t* scale[kMaxStates] = {};  // biased exponents, one per block of a state
  int64_t numel = 0;
  int64_t first_chunk = 0;
  int64_t group = 0;
  int64_t origin = 0;  // where in the whole tensor the first element lies, where this is a part of one
  Weights weights = Weights::kFloat32;
  States states = States::kFloat32;
  int64_t unused = 0;

  AF_METHOD bool is_plain() const { return weights == Weights::kFloat32 && states == States::kFloat32; }
};

// What changes with every call.
struct Operands {
  const void* grad = nullptr;    // null: no gradient in this call
  float* accumulator = nullptr;  // null: not folded in this call
  int32_t weight = kOverwrite;   // of what the accumulator holds: an index into the window's weights
  Dtype grad_dtype = Dtype::kFloat32;
  int64_t unused = 0;
};

static_assert(sizeof(Row) % 16 == 0 && sizeof(Operands) % 16 == 0, "copied to a GPU 16 bytes at a time");

struct Rows {
  const Row* rows;
  const Operands* operands;
  int64_t count;
  int64_t chunks;  // over all rows
  bool plain;      // so is every row
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
