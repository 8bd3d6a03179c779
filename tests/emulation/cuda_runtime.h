// CUDA on the CPU, as far as csrc/cuda needs it, in place of the real header: every thread of a block is a fiber, which
// runs until it waits for others. Blocks run one after another; blocks, and the threads between two barriers, in an
// order that is shuffled anew each time: what relies on a barrier that is not there goes wrong.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __builtin_assume(condition) ((void)(condition))

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3(unsigned count = 1) : x(count) {}
};

namespace emulation {

constexpr int kWarp = 32;
enum class State { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state = State::kReady;
};

struct Machine {
  static constexpr size_t kStack = 64 << 10;
  std::mt19937 shuffle{0};
  std::vector<Thread> threads;
  ucontext_t scheduler;
  void (*body)(const void*) = nullptr;  // the kernel, and its arguments
  const void* arguments = nullptr;
  dim3 thread{0}, block{0}, grid{0};
  uint32_t exchanged[1024];

  // What tests set.
  int multiprocessors = 3;
  int skipped_barrier = -1;  // of the barriers that each thread of a block comes to, the one that is not there
  int launches_until_failure = -1;
  uint64_t capture = 0;
  std::vector<std::function<void()>> captured;  // launches, to be made again
  std::string trouble;                          // CUDA's reason why nothing runs
  long launches = 0;
  bool stuck = false;
  std::vector<int> barriers_of;  // how many each thread has come to

  static Machine& get() {
    static Machine machine;
    return machine;
  }

  void wait(State state) {
    Thread& self = threads[thread.x];
    self.state = state;
    swapcontext(&self.context, &scheduler);
  }

  static void run_thread() {
    Machine& machine = get();
    machine.body(machine.arguments);
    machine.wait(State::kDone);
  }

  void run_block(unsigned count) {
    if (threads.size() < count) threads = std::vector<Thread>(count);
    barriers_of.assign(count, 0);
    for (Thread& each : threads) {
      if (!each.stack) each.stack = std::make_unique<char[]>(kStack);
      each.state = State::kReady;
      getcontext(&each.context);
      each.context.uc_stack.ss_sp = each.stack.get();
      each.context.uc_stack.ss_size = kStack;
      makecontext(&each.context, run_thread, 0);
    }
    std::vector<unsigned> order(count);
    std::iota(order.begin(), order.end(), 0u);
    for (;;) {
      std::shuffle(order.begin(), order.end(), shuffle);
      bool ran = false;
      for (const unsigned index : order) {
        if (threads[index].state != State::kReady) continue;
        ran = true;
        thread.x = index;
        swapcontext(&scheduler, &threads[index].context);
      }
      if (!ran && !release(count)) return;
    }
  }

  void run_grid(unsigned blocks, unsigned count) {
    grid.x = blocks;
    std::vector<unsigned> order(blocks);
    std::iota(order.begin(), order.end(), 0u);
    std::shuffle(order.begin(), order.end(), shuffle);
    for (const unsigned index : order) {
      block.x = index;
      run_block(count);
    }
  }

  // Lets those go on for whom all others have come; false when all are done.
  bool release(unsigned count) {
    unsigned at_block = 0, done = 0;
    bool released = false;
    for (unsigned warp = 0; warp < count; warp += kWarp) {
      unsigned at_warp = 0;
      for (unsigned i = warp; i < warp + kWarp; ++i) {
        at_block += threads[i].state == State::kAtBlockBarrier;
        at_warp += threads[i].state == State::kAtWarpBarrier;
        done += threads[i].state == State::kDone;
      }
      if (at_warp == kWarp) {
        released = true;
        for (unsigned i = warp; i < warp + kWarp; ++i) threads[i].state = State::kReady;
      }
    }
    if (released) return true;
    if (done == count) return false;
    if (at_block != count) {
      stuck = true;  // they wait at a barrier for threads that have gone, or never come
      return false;
    }
    for (unsigned i = 0; i < count; ++i) threads[i].state = State::kReady;
    return true;
  }
};

}  // namespace emulation

inline const dim3& threadIdx = emulation::Machine::get().thread;
inline const dim3& blockIdx = emulation::Machine::get().block;
inline const dim3& gridDim = emulation::Machine::get().grid;

inline void __syncthreads() {
  auto& machine = emulation::Machine::get();
  if (machine.barriers_of[machine.thread.x]++ == machine.skipped_barrier) return;
  machine.wait(emulation::State::kAtBlockBarrier);
}

// What body(the values of a warp's threads, this thread's lane) makes of them.
template <class T, class Body>
T in_warp(T value, const Body& body) {
  static_assert(sizeof(T) == 4, "one register");
  auto& machine = emulation::Machine::get();
  const unsigned index = machine.thread.x, lane = index % emulation::kWarp;
  memcpy(&machine.exchanged[index], &value, sizeof value);
  machine.wait(emulation::State::kAtWarpBarrier);
  T values[emulation::kWarp];
  memcpy(values, &machine.exchanged[index - lane], sizeof values);
  machine.wait(emulation::State::kAtWarpBarrier);
  return body(values, int(lane));
}

template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  return in_warp(value,
                 [=](const T* values, int lane) { return lane + by < emulation::kWarp ? values[lane + by] : value; });
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int by) {
  return in_warp(value, [=](const T* values, int lane) { return values[lane ^ by]; });
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t value) {
  return in_warp(value,
                 [](const uint32_t* values, int) { return *std::max_element(values, values + emulation::kWarp); });
}

inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline uint32_t min(uint32_t a, uint32_t b) { return a < b ? a : b; }
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) { return max(a >> 16, b >> 16) << 16 | max(a & 0xffff, b & 0xffff); }
inline uint32_t __vminu2(uint32_t a, uint32_t b) { return min(a >> 16, b >> 16) << 16 | min(a & 0xffff, b & 0xffff); }
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= uint32_t(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return result;
}

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

inline void __threadfence() {}
inline bool __isGlobal(const void*) { return true; }
inline float __ldcg(const float* from) { return *from; }
inline uint32_t atomicInc(uint32_t* to, uint32_t last) { return std::exchange(*to, *to >= last ? 0 : *to + 1); }

// ---- the host's side ------------------------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInitializationError = 3,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchTimeout = 702,
  cudaErrorUnknown = 999
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone = 0, cudaStreamCaptureStatusActive = 1 };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount = 16 };
using cudaStream_t = struct CUstream_st*;
struct cudaFuncAttributes {};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaErrorLaunchOutOfResources ? "too many resources requested for launch"
         : status == cudaErrorLaunchTimeout      ? "threads wait for others at a barrier"
         : status == cudaErrorUnknown            ? emulation::Machine::get().trouble.c_str()
                                                 : "an error";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
// The launches remember per device how many blocks it runs at once.
inline cudaError_t cudaGetDevice(int* device) {
  const auto& machine = emulation::Machine::get();
  return *device = machine.multiprocessors, machine.trouble.empty() ? cudaSuccess : cudaErrorUnknown;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  return *value = emulation::Machine::get().multiprocessors, cudaSuccess;
}
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, Kernel, int, size_t) {
  return *blocks = 1, cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel) {
  return cudaSuccess;
}
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id) {
  *id = emulation::Machine::get().capture;
  *status = *id != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... given) {
  auto& machine = emulation::Machine::get();
  if (machine.launches_until_failure >= 0 && machine.launches_until_failure-- == 0) {
    return cudaErrorLaunchOutOfResources;
  }
  ++machine.launches;
  using Call = std::pair<void (*)(Parameters...), std::tuple<std::remove_cv_t<Parameters>...>>;
  const auto run = [&machine, config = *config, call = Call{kernel, {std::forward<Arguments>(given)...}}] {
    machine.arguments = &call;
    machine.body = [](const void* arguments) {
      const auto& [function, values] = *static_cast<const Call*>(arguments);
      std::apply(function, values);
    };
    machine.run_grid(config.gridDim.x, config.blockDim.x);
  };
  run();
  if (machine.capture != 0) machine.captured.push_back(run);
  return std::exchange(machine.stuck, false) ? cudaErrorLaunchTimeout : cudaSuccess;
}
