// Python's view of the GPU's kernels: `_C.cuda`.
#include "../binding.h"

#include <pybind11/functional.h>

#include "../table.h"
#include "launch.h"

namespace accumfused {
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
      .def_static("bytes", [](const Table& table) { return DeviceTable::bytes(table.rows()); })
      .def("accumulate",
           [](DeviceTable& self, const Table& table, cuda::Stream stream, const GivenNumber& factor, uintptr_t before,
              bool overwrites, uintptr_t partials) {
             const Fold fold = make_fold(factor, before, overwrites, partials);
             const py::gil_scoped_release released;
             self.accumulate(table.rows(), stream, fold);
           })
      .def(
          "norm",
          [](DeviceTable& self, const Table& table, cuda::Stream stream, bool reads, uintptr_t partials,
             double normalization, uintptr_t device_normalization, uintptr_t found_inf, bool takes_norm,
             std::optional<double> max_grad_norm, bool skips_nonfinite, uintptr_t outcome, uintptr_t skips) {
            self.norm(table.rows(), stream,
                      {reads, partials, normalization, device_normalization, found_inf, takes_norm, max_grad_norm,
                       skips_nonfinite, outcome, skips});
          },
          release)
      .def("segment_norms", &DeviceTable::segment_norms, release)
      .def(
          "step",
          [](DeviceTable& self, const Table& table, cuda::Stream stream,
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
