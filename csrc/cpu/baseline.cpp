#define AF_TARGET baseline
#include "kernels.inl"

const accumfused::cpu::Kernels accumfused::cpu::kBaseline = {"baseline", baseline::accumulate, baseline::norm,
                                                             baseline::step, baseline::kRules};
