// The instruction sets that this machine can run, and the list of rules. Compiled for the baseline.
#define AF_TARGET baseline
#include "../rules.h"
#include "kernels.h"

namespace accumfused::cpu {

std::vector<const Kernels*> supported() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4) found.push_back(&kX86V4);
  if (v3) found.push_back(&kX86V3);
#endif
  found.push_back(&kBaseline);
  return found;
}

std::vector<RuleInfo> rules() {
  using namespace baseline;
#define AF_INFO(Rule) \
  {Rule::kName, Rule::kDigest, Rule::kStates, Rule::kStateNames, Rule::kCountsSteps, Rule::kHypers, Rule::kHyperNames},
  return {AF_RULES(AF_INFO)};
#undef AF_INFO
}

}  // namespace accumfused::cpu
