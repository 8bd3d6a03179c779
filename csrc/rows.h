// The kernels work on rows, one per parameter in the optimizer's order, and on the operands of one call. No Python, no
// torch.
#pragma once
#include <cstdint>

#include "target.h"

namespace accumfused {

// A chunk is a fixed-length piece of one tensor: the unit of work, and of the norm's summation order. Both numbers are
// part of the arithmetic: every backend reads them from here (`_C.CHUNK`, `_C.LANES`) or is tested against them.
constexpr int64_t kChunk = 32768;
constexpr int64_t kLanes = 1024;
constexpr int kMaxStates = 4;   // per element
constexpr int kMaxHypers = 12;  // of a rule
constexpr int kMaxFunctorBytes = 96;

// States in 8 bits: the elements of a quantisation block, which share a scale (a warp's 32 threads hold four each), the
// smallest code of a second moment, and the smallest biased exponent of a scale that is not 0.
constexpr int64_t kQuantBlock = 128;
constexpr int kMinSecondMoment = 4;
constexpr int kSmallestScale = 33;

enum class Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2 };

// The formats of a parameter and of its states: see accumfused/formats/kinds.py.
enum class Weights : int32_t {
  kFloat32 = 0,
  kBfloat16Stochastic,
  kBfloat16Split16,
  kBfloat16Split8,
  kFloat16Master,
};
enum class States : int32_t { kFloat32 = 0, kBfloat16, kInt8 };

// The part that lasts from call to call: the parameter, its states and its place in the order of chunks.
struct Row {
  void* param = nullptr;
  float* step = nullptr;          // null: none is counted
  const int64_t* seed = nullptr;  // null: nothing is rounded stochastically
  void* master = nullptr;         // the rest of the parameter's fp32 value
  void* state[kMaxStates] = {};
  uint8_t* scale[kMaxStates] = {};  // biased exponents, one per quantisation block of a state
  int64_t numel = 0;
  int64_t origin = 0;       // the first element's place in the whole tensor
  int32_t first_chunk = 0;  // 2^31 chunks would be 2^46 elements
  int32_t first_unit = 0;   // of cuda/work.cuh
  int32_t group = 0;
  Weights weights = Weights::kFloat32;
  States states = States::kFloat32;

  AF_METHOD bool is_plain() const { return weights == Weights::kFloat32 && states == States::kFloat32; }
};

// The part that may change with every call.
struct Operands {
  const void* grad = nullptr;  // null: no gradient in this call
  void* sum = nullptr;         // null: not folded in this call
  Dtype grad_dtype = Dtype::kFloat32;
  Dtype sum_dtype = Dtype::kFloat32;  // or bf16, in which results are rounded
};

struct Rows {
  const Row* rows;
  const Operands* operands;
  int64_t count;
  int64_t chunks;         // over all rows
  bool plain;             // so is every row
  int64_t first_row = 0;  // its place among the optimizer's rows, if these are some of them: noise depends on it
};

// A number that a call brings along, or one that the device holds: a graph's replay reads that one anew.
struct Number {
  double number;
  const double* on_device;  // nullable

  AF_METHOD double value() const { return on_device ? *on_device : number; }
};

// One launch of accumulate: sum <- sum + factor * grad, or sum <- factor * grad where it overwrites; in fp32. While
// *before is 0 the sums hold nothing, and become their gradients, or 0 without one. Else a factor of 0 leaves a sum as
// it is, or overwrites it with 0, whatever the gradient is. `partials[chunk]` becomes the sum of squares of the result,
// unless gradients are copied as they are.
//
// A sum in bf16 is rounded by noise, whose key is words[chunk] with the salt. The word of a chunk that may be rounded
// is then one more, so each addition has noise of its own, also where a graph is replayed.
struct Fold {
  Number factor;
  const double* before;  // nullable
  bool overwrites;
  bool copies;  // gradients as they are
  float* partials;
  uint64_t* words;  // [chunks]; null: sums in bf16 are rounded to nearest
  uint64_t salt;

  AF_METHOD float multiplier() const { return float(factor.value()); }
  // Whether a row's results may be no numbers of bf16.
  AF_METHOD static bool rounds(const Operands& in, bool keeps, float factor) {
    return in.grad != nullptr && factor != 0.0f && (keeps || factor != 1.0f || in.grad_dtype != Dtype::kBfloat16);
  }
  AF_METHOD bool is_fresh() const { return before != nullptr && *before == 0.0; }
};

// A hyper-parameter of a GPU's launch: a number, or one that the device holds and a graph's replay reads anew.
struct HyperParameter {
  double number;
  const float* device_float;  // nullable, as the next
  const double* device_double;

  AF_METHOD double value() const {
    return device_float ? double(*device_float) : device_double ? *device_double : number;
  }
};

// Memory comes from Python as an address.
template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

AF_INLINE int64_t chunk_count(int64_t numel) { return (numel + kChunk - 1) / kChunk; }

}  // namespace accumfused
