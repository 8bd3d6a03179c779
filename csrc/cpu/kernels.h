// The three verbs on the CPU, once per instruction set. Each takes plain memory; the caller keeps the tensors alive.
#pragma once
#include <vector>

#include "../rows.h"

namespace accumfused::cpu {

struct Work : Rows {
  int threads;
};

struct Step;

// A thread's: scalars cost two powers, and consecutive chunks mostly share them.
struct Prepared {
  int64_t group = -1, count = -1, row = -1;  // row: -1 where rows share it
  alignas(8) unsigned char rule[kMaxFunctorBytes];
};

// A rule's step, for one instruction set.
using RuleCode = void (*)(const Row&, int64_t index, const Operands&, const Step&, Prepared&, int64_t offset,
                          int64_t n);

struct Step {
  const double* hypers;          // [groups][hyper_stride]
  const RuleCode* const* rules;  // [groups]
  int64_t hyper_stride;
  const float* outcome;       // {coefficient, norm, skipped}
  const float* coefficients;  // nullable: each row's own
};

struct RuleInfo {
  const char* name;
  const char* digest;  // of its functor
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
  const RuleCode* rules;  // in the order of rules()
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
