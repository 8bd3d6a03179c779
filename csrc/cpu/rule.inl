// The step of one rule on the CPU: a chunk at a time, for one instruction set. kernels.inl has it for the rules of the
// package; accumfused/rules/compile.py compiles it for a rule of the user's own.
#include <utility>

#include "../codecs.h"
#include "../rules.h"
#include "kernels.h"
#include "lanes.inl"

namespace accumfused::AF_TARGET {
namespace {

using cpu::Prepared;
using cpu::RuleCode;
using cpu::Step;

template <class Body>
auto with_grad(const Operands& in, int64_t offset, const Body& body) {
  switch (in.grad_dtype) {
    case Dtype::kFloat16: return body(static_cast<const Float16*>(in.grad) + offset);
    case Dtype::kBfloat16: return body(static_cast<const Bfloat16*>(in.grad) + offset);
    default: return body(static_cast<const float*>(in.grad) + offset);
  }
}

// The same; where a rule is not common, 16-bit gradients are converted before.
template <class Rule, class Body>
void with_grad_for(const Operands& in, int64_t offset, const Body& body) {
  if constexpr (Rule::kIsCommon) with_grad(in, offset, body);
  else body(static_cast<const float*>(in.grad) + offset);
}

template <class Rule>
constexpr std::make_index_sequence<Rule::kStates> kAllStates;

template <class Rule, bool kFlush, class G, class... State>
AF_INLINE void update(const Rule& rule, float* __restrict param, const G* __restrict grad, int n,
                      State* __restrict... state) {
  for (int i = 0; i < n; ++i) {
    rule(param[i], to_float(grad[i]), state[i]...);
    if constexpr (kFlush) ((state[i] = flush_subnormal(state[i])), ...);
  }
}

// The same with the states in an array.
template <class Rule, bool kFlush, class G, size_t... k>
AF_INLINE void update(const Rule& rule, float* param, const G* grad, float* const* state, int n,
                      std::index_sequence<k...>) {
  update<Rule, kFlush>(rule, param, grad, n, state[k]...);
}

}  // namespace
}  // namespace accumfused::AF_TARGET

#include "formats.inl"

namespace accumfused::AF_TARGET {
namespace {

template <class Rule>
void run_rule(const Row& row, int64_t index, const Operands& in, const Step& step, Prepared& prepared, int64_t offset,
              int64_t n) {
  static_assert(sizeof(Rule) <= sizeof(Prepared::rule) && __is_trivially_copyable(Rule), "scalars only");
  const int64_t count = row.step ? whole_steps(*row.step) + 1 : 0;
  const int64_t own = step.coefficients ? index : -1;
  if (prepared.group != row.group || prepared.count != count || prepared.row != own) {
    const float coefficient = step.coefficients ? step.coefficients[index] : step.outcome[0];
    const Rule rule(step.hypers + row.group * step.hyper_stride, count, coefficient);
    memcpy(prepared.rule, &rule, sizeof rule);
    prepared.group = row.group, prepared.count = count, prepared.row = own;
  }
  const Rule rule = *reinterpret_cast<const Rule*>(prepared.rule);
  if (!row.is_plain() || (!Rule::kIsCommon && in.grad_dtype != Dtype::kFloat32)) {
    step_formatted(rule, row, index, in, count, offset, n);
    return;
  }
  float* state[kMaxStates];
  for (int k = 0; k < kMaxStates; ++k) state[k] = row.state[k] ? static_cast<float*>(row.state[k]) + offset : nullptr;
  float* const param = static_cast<float*>(row.param) + offset;
  with_grad_for<Rule>(in, offset,
                      [&](auto grad) { update<Rule, true>(rule, param, grad, state, int(n), kAllStates<Rule>); });
}

template <class Rule>
constexpr RuleCode kRuleCode = run_rule<Rule>;

}  // namespace
}  // namespace accumfused::AF_TARGET
