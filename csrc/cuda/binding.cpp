// Python's view of the GPU's kernels: `_C.cuda`.
#include "../binding.h"

#include <pybind11/functional.h>

#include "../table.h"
#include "launch.h"

namespace accumfused {
namespace {

// In the order of Norm.
using NormTuple =
    std::tuple<bool, uintptr_t, double, uintptr_t, uintptr_t, bool, std::optional<double>, bool, uintptr_t, uintptr_t>;

cuda::Norm norm_of(const NormTuple& values) {
  return std::apply([](const auto&... each) { return cuda::Norm{each...}; }, values);
}

}  // namespace

void bind_cuda(py::module_& m) {
  using cuda::DeviceTable;
  const auto release = py::call_guard<py::gil_scoped_release>();
  m.def("why_not", cuda::why_not, py::arg("device"), "Why the kernels cannot run on that device, or ''.");
  m.def("allow", cuda::allow, py::arg("queue") = true, "What launches may do, see launch.h; allow() is as at first.");
  m.attr("ARCHS") = AF_CUDA_ARCHS;
  m.attr("COMPILER") = AF_CUDA_VERSION;
  py::class_<DeviceTable>(m, "DeviceTable", py::module_local())
      .def(py::init(
               [](int device, uintptr_t memory, const Table& table, uintptr_t stream, const cuda::Allocate& allocate) {
                 return new DeviceTable(device, memory, table.rows(), stream, allocate);
               }),
           py::arg("device"), py::arg("memory"), py::arg("table"), py::arg("stream"), py::arg("allocate"))
      .def_static(
          "bytes", [](const Table& table) { return DeviceTable::bytes(table.rows()); }, py::arg("table"))
      .def("accumulate",
           [](DeviceTable& self, const Table& table, const cuda::Stream& stream, const GivenNumber& factor,
              uintptr_t before, bool overwrites, uintptr_t partials) {
             const Fold fold = make_fold(factor, before, overwrites, partials);
             const py::gil_scoped_release released;
             self.accumulate(table.rows(), stream, fold);
           })
      .def(
          "norm",
          [](DeviceTable& self, const Table& table, const cuda::Stream& stream, const NormTuple& norm) {
            self.norm(table.rows(), stream, norm_of(norm));
          },
          release)
      .def("segment_norms", &DeviceTable::segment_norms, release)
      .def(
          "step",
          [](DeviceTable& self, const Table& table, const cuda::Stream& stream,
             const std::vector<std::tuple<double, uintptr_t, uintptr_t>>& hypers, const std::vector<int32_t>& rules,
             uintptr_t outcome, uintptr_t coefficients) {
            std::vector<HyperParameter> values;
            for (const auto& [number, device_float, device_double] : hypers) {
              values.push_back({number, pointer<const float>(device_float), pointer<const double>(device_double)});
            }
            self.step(table.rows(), stream, values, rules, outcome, coefficients);
          },
          release);
}

}  // namespace accumfused
