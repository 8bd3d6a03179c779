// The three verbs on the CPU, once per instruction set. Each takes plain memory; the caller keeps the tensors alive.
#pragma once
#include "../rows.h"

namespace accumfused::cpu {

struct Work : Rows {
  int threads;
};

// accumulator <- (w[operands.weight] * scale) * accumulator + (w[weight] * scale) * grad, in fp32; a weight of 0 leaves
// its term out, whatever it holds. An accumulator that holds nothing (kOverwrite) takes the gradient as it is. Where a
// gradient was added, or the accumulator rescaled, `partials[chunk]` becomes the sum of squares of the result.
struct Fold {
  const double* weights;
  int64_t weight;
  double scale;
  const double* device_scale;  // nullable; multiplies `scale`
  float* partials;
};

struct Step {
  const double* hypers;  // [groups][hyper_stride]
  const int32_t* rules;  // [groups], indices into rules()
  int64_t hyper_stride;
  const float* outcome;  // {coefficient, norm, skipped}
};

struct RuleInfo {
  const char* name;
  int states;
  const char* const* state_names;
  bool counts_steps;
  int hypers;
  const char* const* hyper_names;
};

struct Kernels {
  const char* name;
  void (*accumulate)(const Work&, const Fold&);
  void (*norm)(const Work&, float* partials);
  void (*step)(const Work&, const Step&);
};

extern const Kernels kBaseline;
#if defined(__x86_64__)
extern const Kernels kX86V3;
extern const Kernels kX86V4;
#endif

// dispatch.cpp
int supported(const Kernels** out, int capacity);  // what this machine can run, best first
int rules(RuleInfo* out, int capacity);

}  // namespace accumfused::cpu
