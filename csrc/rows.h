// What the kernels work on: one row per parameter, in the optimizer's order. No Python, no torch.
#pragma once
#include <cstdint>

namespace accumfused {

// A chunk is a fixed-length piece of one tensor: the unit of work, and of the norm's summation order. Both numbers are
// part of the arithmetic: every backend reads them from here (`_C.CHUNK`, `_C.LANES`) or is tested against them.
constexpr int64_t kChunk = 32768;
constexpr int64_t kLanes = 1024;
constexpr int kMaxStates = 3;

enum class Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

// Indices into the weights of a window.
constexpr int32_t kOverwrite = -1;  // the accumulator holds nothing yet

struct Row {
  float* param = nullptr;
  const void* grad = nullptr;    // null: no gradient in this call
  float* accumulator = nullptr;  // null: not folded in this call
  float* state[kMaxStates] = {};
  float* step = nullptr;  // null: the rule counts no steps
  int64_t numel = 0;
  int64_t first_chunk = 0;
  int32_t group = 0;
  int32_t weight = kOverwrite;  // of what the accumulator holds: an index into the window's weights
  Dtype grad_dtype = Dtype::kFloat32;
};

static constexpr int64_t chunk_count(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

}  // namespace accumfused
