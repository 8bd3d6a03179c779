#define AF_TARGET x86_64_v4
#include "kernels.inl"

const accumfused::cpu::Kernels accumfused::cpu::kX86V4 = {"x86_64_v4", x86_64_v4::accumulate, x86_64_v4::norm,
                                                          x86_64_v4::step, x86_64_v4::kRules};
