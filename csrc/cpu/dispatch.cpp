// Which instruction sets this machine can run, and the list of rules. Compiled for the baseline.
#define AF_TARGET baseline
#include "../rules.h"
#include "kernels.h"

namespace accumfused::cpu {

int supported(const Kernels** out, int capacity) {
  int count = 0;
  const auto add = [&](const Kernels& kernels) {
    if (count < capacity) out[count++] = &kernels;
  };
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) add(kX86V4);
  if (v3) add(kX86V3);
#endif
  add(kBaseline);
  return count;
}

int rules(RuleInfo* out, int capacity) {
  int count = 0;
#define AF_INFO(Rule)                                                                                   \
  if (count < capacity)                                                                                 \
    out[count++] = {baseline::Rule::kName,        baseline::Rule::kStates, baseline::Rule::kStateNames, \
                    baseline::Rule::kCountsSteps, baseline::Rule::kHypers, baseline::Rule::kHyperNames};
  AF_RULES(AF_INFO)
#undef AF_INFO
  return count;
}

}  // namespace accumfused::cpu
