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
constexpr int kMaxStates = 4;        // per element
constexpr int kMaxTensorStates = 3;  // per tensor, beside the step count
constexpr int kMaxHypers = 12;       // of a rule
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
  kFloat16Stochastic,
  kBfloat16Split16,
  kBfloat16Split8,
  kBfloat16Master,
  kFloat16Master,
};
enum class States : int32_t { kFloat32 = 0, kBfloat16, kInt8 };

constexpr int32_t kOverwrite = -1;  // in place of a weight's index: the accumulator holds nothing yet

// The part that lasts from call to call: the parameter, its states and its place in the order of chunks.
struct Row {
  void* param = nullptr;
  float* step = nullptr;          // null: none is counted
  const int64_t* seed = nullptr;  // null: nothing is rounded stochastically
  float* tensor_state[kMaxTensorStates] = {};
  void* master = nullptr;  // the rest of the parameter's fp32 value
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

// The part that changes with every call.
struct Operands {
  const void* grad = nullptr;    // null: no gradient in this call
  float* accumulator = nullptr;  // null: not folded in this call
  int32_t weight = kOverwrite;   // the accumulator's: an index into the window's weights
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

// A number that a call brings along, or one that the device holds: a graph's replay reads that one anew.
struct Number {
  double number;
  const double* on_device;  // nullable

  AF_METHOD double value() const { return on_device ? *on_device : number; }
};

constexpr int kPlaces = 4;  // of a window's weights: accumfused/core/weights.py

// accumulator <- (w[operands.weight] * scale) * accumulator + (w[weight] * scale) * grad, in fp32; a weight of 0 leaves
// its term out, whatever it holds. An accumulator that holds nothing (kOverwrite) takes the gradient as it is. Where a
// gradient was added, or the accumulator rescaled, `partials[chunk]` becomes the sum of squares of the result.
struct Fold {
  Number weights[kPlaces];
  int64_t weight;
  Number scale;
  float* partials;

  AF_METHOD float factor(int64_t place) const { return float(weights[place].value() * scale.value()); }
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
