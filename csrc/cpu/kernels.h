// The three verbs on the CPU, once per instruction set. Each takes plain memory; the caller keeps the tensors alive.
#pragma once
#include <vector>

#include "../rows.h"

namespace accumfused::cpu {

struct Work : Rows {
  int threads;
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
std::vector<const Kernels*> supported();  // those that this machine can run, best first
std::vector<RuleInfo> rules();

}  // namespace accumfused::cpu
