#define AF_TARGET x86_64_v3
#include "kernels.inl"

const accumfused::cpu::Kernels accumfused::cpu::kX86V3 = {"x86_64_v3", x86_64_v3::accumulate, x86_64_v3::norm,
                                                          x86_64_v3::step, x86_64_v3::kRules};
