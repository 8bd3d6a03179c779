// The parts of the Python module.
#pragma once
#include <pybind11/pybind11.h>

namespace accumfused {

namespace py = pybind11;

void bind_table(py::module_& m);  // table.cpp
void bind_cuda(py::module_& m);   // cuda/binding.cpp, where CUDA is built

}  // namespace accumfused
