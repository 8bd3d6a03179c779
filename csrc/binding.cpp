// Python's view of the kernels. Tensors outside the table come as addresses; the caller keeps them alive.
#define AF_TARGET baseline
#include "binding.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "cpu/float_mode.h"
#include "cpu/kernels.h"
#include "norm.h"
#include "table.h"

#if defined(__GLIBC__)
// libstdc++ asks glibc 2.32 and newer for it. With one of our own ("no": reference counts are atomic) the module loads
// on older ones too.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;
#endif

namespace accumfused {
namespace {

const cpu::Kernels& kernels(const std::string& instruction_set) {
  for (const cpu::Kernels* available : cpu::supported()) {
    if (instruction_set == available->name) return *available;
  }
  throw py::value_error("instruction set " + instruction_set + " cannot run on this machine; see instruction_sets()");
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const cpu::Kernels* available : cpu::supported()) names.emplace_back(available->name);
  return names;
}

py::list rules() {
  py::list out;
  for (const cpu::RuleInfo& rule : cpu::rules()) {
    py::list states, hypers;
    for (int k = 0; k < rule.states; ++k) states.append(rule.state_names[k]);
    for (int k = 0; k < rule.hypers; ++k) hypers.append(rule.hyper_names[k]);
    out.append(py::make_tuple(rule.name, rule.digest, py::tuple(states), rule.counts_steps, py::tuple(hypers)));
  }
  return out;
}

std::vector<uintptr_t> rule_codes(const std::string& instruction_set) {
  std::vector<uintptr_t> codes;
  for (size_t i = 0; i < cpu::rules().size(); ++i) {
    codes.push_back(reinterpret_cast<uintptr_t>(&kernels(instruction_set).rules[i]));
  }
  return codes;
}

cpu::Work work_on(const Table& table, int threads) {
  // Waking a thread takes longer than a few hundred kilobytes do: 64,000 elements took 46 us alone, 50 to 150 in two.
  constexpr int64_t kSerialElements = 1 << 17;
  if (threads < 1 || table.numel() < kSerialElements) threads = 1;
  return {table.rows(), threads};
}

void accumulate(const std::string& instruction_set, const Table& table, int threads, const GivenNumber& factor,
                uintptr_t before, bool overwrites, bool copies, uintptr_t partials, uintptr_t words, uint64_t salt) {
  const cpu::Kernels& run = kernels(instruction_set);
  const Fold fold = make_fold(factor, before, overwrites, copies, partials, words, salt);
  const py::gil_scoped_release release;
  run.accumulate(work_on(table, threads), fold);
}

void norm(const std::string& instruction_set, const Table& table, int threads, uintptr_t partials) {
  const cpu::Kernels& run = kernels(instruction_set);
  const py::gil_scoped_release release;
  run.norm(work_on(table, threads), pointer<float>(partials));
}

void finish_norm(const Table& table, uintptr_t partials, double normalization, uintptr_t device_normalization,
                 uintptr_t found_inf, bool takes_norm, std::optional<double> max_grad_norm, bool skips_nonfinite,
                 uintptr_t outcome, uintptr_t skips) {
  const baseline::Scaling scaling = baseline::make_scaling(normalization, device_normalization, found_inf, takes_norm,
                                                           max_grad_norm, skips_nonfinite);
  const baseline::FloatMode ieee;
  const double sum = takes_norm ? baseline::sum_partials(pointer<const float>(partials), table.chunks()) : 0.0;
  baseline::finish_norm(scaling, sum, pointer<float>(outcome), pointer<int64_t>(skips));
}

// squares[s]: the sum of partials[bounds[s]] up to partials[bounds[s + 1]], in sum_partials' order.
void segment_norms(uintptr_t partials, uintptr_t bounds, int64_t segments, uintptr_t squares) {
  const int64_t* const bound = pointer<const int64_t>(bounds);
  const baseline::FloatMode ieee;
  for (int64_t s = 0; s < segments; ++s) {
    pointer<double>(squares)[s] =
        baseline::sum_partials(pointer<const float>(partials) + bound[s], bound[s + 1] - bound[s]);
  }
}

// hypers[group]: its numbers in its rule's order, or tensors of one element. rules[group]: the address of its RuleCode.
void step(const std::string& instruction_set, const Table& table, int threads, const std::vector<py::tuple>& hypers,
          const std::vector<uintptr_t>& rules, uintptr_t outcome, uintptr_t coefficients) {
  const cpu::Kernels& run = kernels(instruction_set);
  size_t stride = 0;
  for (const py::tuple& group : hypers) stride = std::max(stride, group.size());
  std::vector<double> numbers(hypers.size() * stride);
  for (size_t g = 0; g < hypers.size(); ++g) {
    for (size_t k = 0; k < hypers[g].size(); ++k) {
      const double number = PyFloat_AsDouble(PyTuple_GET_ITEM(hypers[g].ptr(), k));
      if (number == -1.0 && PyErr_Occurred()) throw py::error_already_set();
      numbers[g * stride + k] = number;
    }
  }
  std::vector<const cpu::RuleCode*> codes;
  for (const uintptr_t rule : rules) codes.push_back(pointer<const cpu::RuleCode>(rule));
  const py::gil_scoped_release release;
  run.step(work_on(table, threads), {numbers.data(), codes.data(), int64_t(stride), pointer<const float>(outcome),
                                     pointer<const float>(coefficients)});
}

}  // namespace
}  // namespace accumfused

PYBIND11_MODULE(_C, m) {
  using namespace accumfused;
  m.doc() = "accumfused's native kernels: addresses in, memory written, no torch.";
#if defined(__clang__)
  m.attr("COMPILER") = __VERSION__;
#else
  m.attr("COMPILER") = "GCC " __VERSION__;
#endif
  m.attr("INTERFACE") = AF_INTERFACE;  // accumfused/compiling.py
  m.attr("CHUNK") = kChunk;
  m.attr("LANES") = kLanes;
  m.attr("BLOCK") = kQuantBlock;
  m.attr("MIN_SECOND_MOMENT") = kMinSecondMoment;
  m.attr("SMALLEST_SCALE") = kSmallestScale;
  m.def("instruction_sets", instruction_sets, "What this machine can run, best first.");
  m.def("rules", rules,
        "Of each rule: name, digest of its functor, state names, whether it counts steps, names of its "
        "hyper-parameters.");
  m.def("rule_codes", rule_codes,
        "The addresses of the rules' RuleCode for an instruction set, in the order of rules().");
  bind_table(m);
#if defined(AF_CUDA_ARCHS)
  auto cuda = m.def_submodule("cuda", "The kernels for GPUs.");
  bind_cuda(cuda);
#endif
  m.def("accumulate", accumulate);
  m.def("norm", norm);
  m.def("finish_norm", finish_norm);
  m.def("segment_norms", segment_norms);
  m.def("step", step);
}
