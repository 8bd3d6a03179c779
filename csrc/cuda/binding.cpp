// Python's view of the GPU's kernels: `_C.cuda`.
#include "../binding.h"

#include <pybind11/functional.h>

#include <utility>
#include <variant>

#include "../table.h"
#include "launch.h"

namespace accumfused {
void bind_cuda(py::module_& m) {
  using cuda::DeviceTable;
  using OnDevice = std::pair<uintptr_t, uintptr_t>;  // a tensor's address: of fp32, or of fp64
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
              bool overwrites, bool copies, uintptr_t partials, uintptr_t words, uint64_t salt) {
             const Fold fold = make_fold(factor, before, overwrites, copies, partials, words, salt);
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
             const std::vector<std::vector<std::variant<double, OnDevice>>>& hypers, const std::vector<int32_t>& rules,
             uintptr_t outcome, uintptr_t coefficients) {
            size_t stride = 0;
            for (const auto& group : hypers) stride = std::max(stride, group.size());
            std::vector<HyperParameter> values(hypers.size() * stride);  // those that only other groups have are 0
            for (size_t g = 0; g < hypers.size(); ++g) {
              for (size_t k = 0; k < hypers[g].size(); ++k) {
                HyperParameter& value = values[g * stride + k];
                if (const auto* number = std::get_if<double>(&hypers[g][k])) {
                  value.number = *number;
                } else {
                  const auto& [device_float, device_double] = std::get<OnDevice>(hypers[g][k]);
                  value.device_float = pointer<const float>(device_float);
                  value.device_double = pointer<const double>(device_double);
                }
              }
            }
            self.step(table.rows(), stream, values, rules, outcome, coefficients);
          },
          release);
}

}  // namespace accumfused
