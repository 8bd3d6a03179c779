// The optimizers' elementwise arithmetic: one functor per rule, and AF_RULES, the list of rules. CPU and CUDA include
// this file. accumfused/rules/to_cpp.py prints both from the rules in accumfused/optimizers/.
//
// A functor is built once per tensor from its group's hyper-parameters, the number of this step (1 for the first) and
// the coefficient. It holds the numbers that all elements share, computed in double and rounded to fp32 once. The call
// takes one element: parameter, gradient as it was read, and as many states as the rule has; second moments begin at
// kFirstSecondMoment.
#pragma once
#include "numeric.h"

namespace accumfused::AF_TARGET {
#include "functors.h"
}  // namespace accumfused::AF_TARGET
