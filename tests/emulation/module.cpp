// csrc/cuda over the emulation, as a Python module of its own: the same names as accumfused._C.cuda, and a Table.
#include <cuda_runtime.h>
#include <pybind11/stl.h>

#include <cstdio>

#include "../../csrc/binding.h"
#include "../../csrc/cuda/launch.h"

// What the compiler calls before each access of launch.cu, if it was asked to check them (CHECKS in __init__.py).
namespace {

void check(uintptr_t at, size_t bytes, bool writes) {
  if (!emulation::Machine::in_kernel) return;  // nor is there a machine, at first
  auto& machine = emulation::Machine::get();
  const char* const what = writes ? "writes" : "reads";
  char text[99];
  if (!machine.allows(at, bytes)) {
    snprintf(text, sizeof text, "it %s %zu bytes at %#zx, outside of the device's memory", what, bytes, size_t(at));
    machine.give_up(text);
  }
  if (const int other = machine.races(at, bytes, writes); other >= 0) {
    snprintf(text, sizeof text, "a race: thread %u %s shared memory that thread %d has used since the last barrier",
             machine.thread.x, what, other);
    machine.give_up(text);
  }
}

}  // namespace

extern "C" {
#define AF_ACCESS(bytes)                                             \
  void __tsan_read##bytes(uintptr_t at) { check(at, bytes, false); } \
  void __tsan_write##bytes(uintptr_t at) { check(at, bytes, true); }
AF_ACCESS(1)
AF_ACCESS(2)
AF_ACCESS(4)
AF_ACCESS(8)
AF_ACCESS(16)
void __tsan_read_range(uintptr_t at, size_t bytes) { check(at, bytes, false); }
void __tsan_write_range(uintptr_t at, size_t bytes) { check(at, bytes, true); }
uint8_t __tsan_atomic8_load(const volatile uint8_t* at, int) { return *at; }  // whether static variables are there
void __tsan_atomic8_store(volatile uint8_t* at, uint8_t value, int) { *at = value; }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

struct Misaligned {
  const char* file;
  uint32_t line, column;
  const void* type;
  unsigned char log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(const Misaligned* of, uintptr_t at) {
  if (!emulation::Machine::in_kernel) return;
  char text[99];
  snprintf(text, sizeof text, "it takes %#zx, line %u, for a multiple of %d", size_t(at), of->line,
           1 << of->log_alignment);
  emulation::Machine::get().give_up(text);
}
}

PYBIND11_MODULE(AF_EMULATED, m) {
  namespace py = pybind11;
  using emulation::Machine;
  accumfused::bind_table(m);
  accumfused::bind_cuda(m);
  m.def(
      "reset",
      [] {
        static_cast<emulation::Setup&>(Machine::get()) = {};
        accumfused::cuda::allow(true);
      },
      "As if nothing below had been called.");
  m.def("seed", [](unsigned value) { Machine::get().shuffle.seed(value); }, "Of the order of threads and blocks.");
  m.def("multiprocessors", [](int count) { Machine::get().multiprocessors = count; }, "So many blocks run at once.");
  m.def("grid", [] { return Machine::get().grid.x; }, "The thread blocks of the last launch.");
  using emulation::Missing;
  py::class_<Missing>(m, "without", py::module_local(), "For a `with` block in which kernels go without one thing.")
      .def(py::init<std::string, int, int, int, int, int>(), py::arg("of") = "", py::kw_only(), py::arg("barrier") = -1,
           py::arg("shuffle") = -1, py::arg("thread") = -1, py::arg("fence") = -1, py::arg("ticket") = -1)
      .def_readonly("was_met", &Missing::was_met, "Whether some thread came to it.")
      .def("__enter__",
           [](const Missing& self) { Machine::get().missing = self, Machine::get().missing.is_there = true; })
      .def("__exit__", [](Missing& self, const py::args&) { self = std::exchange(Machine::get().missing, {}); });
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
      "capture",
      [](uint64_t id, uintptr_t stream) {
        Machine::get().capture = id, Machine::get().capturing = reinterpret_cast<void*>(stream);
        if (id != 0) Machine::get().captured.clear();
      },
      py::arg("id"), py::arg("stream") = 0,
      "As if a graph captured the stream, but its launches are made too, unless launches wait; id 0: none.");
  m.def(
      "is_relaxed", [] { return Machine::get().is_relaxed; },
      "Whether the thread may do what spoils a capture in others: torch allocates memory on a stream that none "
      "captures.");
  m.def(
      "replay",
      [] {
        for (const emulation::Launch& each : Machine::get().captured) each.run();
      },
      "Makes the launches since the capture began again.");
  m.def(
      "defer", [](bool waits) { Machine::get().defers = waits, Machine::get().queue.clear(); },
      "Launches wait for synchronize(), and those that a capture takes for replay().");
  m.def(
      "synchronize",
      [] {
        auto& machine = Machine::get();
        machine.fault.clear();
        while (!machine.queue.empty()) {  // of one stream in order
          const void* stream = machine.queue[machine.shuffle() % machine.queue.size()].stream;
          const auto next = std::find_if(machine.queue.begin(), machine.queue.end(),
                                         [&](const auto& each) { return each.stream == stream; });
          next->run();
          machine.queue.erase(next);
        }
        const cudaError_t status = launches_status();
        if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
      },
      "Makes the launches that wait.");
  m.def(
      "allow", [](uintptr_t address, size_t bytes) { Machine::get().memory[address] = bytes; },
      "This is the device's memory; without any, all is.");
  m.def(
      "forbid",
      [](std::optional<uintptr_t> address) {
        if (address) Machine::get().memory.erase(*address);
        else Machine::get().memory.clear();
      },
      py::arg("address") = std::nullopt);
  m.def("trouble", [](const std::string& reason) { Machine::get().trouble = reason; }, "Nothing runs; \"\": all does.");
  m.def("launches", [] { return Machine::get().launches; }, "So far.");
}
