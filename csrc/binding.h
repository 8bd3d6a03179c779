// The parts of the Python module.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "rows.h"

namespace accumfused {

namespace py = pybind11;

using GivenNumber = std::pair<double, uintptr_t>;  // as accumfused/backends/cpu.py gives it

Fold make_fold(const GivenNumber& factor, uintptr_t before, bool overwrites, bool copies, uintptr_t partials,
               uintptr_t words, uint64_t salt);  // table.cpp

void bind_table(py::module_& m);  // table.cpp
void bind_cuda(py::module_& m);   // cuda/binding.cpp, where CUDA is built

}  // namespace accumfused
