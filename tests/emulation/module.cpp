// csrc/cuda over the emulation, as a Python module of its own: the same names as accumfused._C.cuda, and a Table.
#include <cuda_runtime.h>

#include "../../csrc/binding.h"

PYBIND11_MODULE(emulated, m) {
  namespace py = pybind11;
  using emulation::Machine;
  accumfused::bind_table(m);
  accumfused::bind_cuda(m);
  m.def("seed", [](unsigned value) { Machine::get().shuffle.seed(value); }, "Of the order of threads and blocks.");
  m.def("multiprocessors", [](int count) { Machine::get().multiprocessors = count; }, "So many blocks run at once.");
  m.def(
      "skip_barrier", [](int index) { Machine::get().skipped_barrier = index; },
      "Takes the index-th barrier of every thread away; -1: none.");
  m.def("skip_fence", [](int index) { Machine::get().skipped_fence = index; }, "The same for the fences of a block.");
  m.def(
      "watch",
      [](uintptr_t address, size_t bytes) {
        Machine::get().watched.push_back({reinterpret_cast<char*>(address), std::vector<char>(bytes)});
      },
      "Blocks see each other's writes there no earlier than fences make them.");
  m.def("unwatch", [] { Machine::get().watched.clear(); });
  m.def(
      "fail_after", [](int launches) { Machine::get().launches_until_failure = launches; },
      "Lets one launch fail after that many more; -1: none.");
  m.def(
      "capture", [](uint64_t id) { Machine::get().capture = id, Machine::get().captured.clear(); },
      "As if a graph were captured, but its launches are made too; 0: none.");
  m.def(
      "replay",
      [] {
        for (const auto& run : Machine::get().captured) run();
      },
      "Makes the launches since the capture began again.");
  m.def("trouble", [](const std::string& reason) { Machine::get().trouble = reason; }, "Nothing runs; \"\": all does.");
  m.def("launches", [] { return Machine::get().launches; }, "So far.");
}
