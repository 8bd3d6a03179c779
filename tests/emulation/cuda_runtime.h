// CUDA on the CPU, as far as csrc/cuda needs it, in place of the real header: what kernels call, and the host's side.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>

#include "machine.h"

#define __global__
#define __device__
#define __host__
#define __constant__ inline
#define __shared__ static thread_local  // of the block whose turn it is: see SharedMemory
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

inline const dim3& threadIdx = emulation::Machine::get().thread;
inline const dim3& blockIdx = emulation::Machine::get().block;
inline const dim3& gridDim = emulation::Machine::get().grid;

inline void __syncthreads() {
  const emulation::InMachine in_machine;
  auto& machine = emulation::Machine::get();
  int& count = machine.running->barriers_of[machine.thread.x];
  if (machine.is_faulty && machine.lacks(&emulation::Missing::barrier, count++)) return;
  machine.wait(emulation::State::kAtBlockBarrier);
  ++machine.running->passed[machine.thread.x].block;
}

// What body(the values of a warp's threads, this thread's lane) makes of them.
template <class T, class Body>
T in_warp(T value, const Body& body) {
  static_assert(sizeof(T) == 4, "one register");
  const emulation::InMachine in_machine;
  auto& machine = emulation::Machine::get();
  const unsigned index = machine.thread.x, lane = index % emulation::kWarp;
  T values[emulation::kWarp];
  if (machine.is_faulty && machine.lacks(&emulation::Missing::shuffle, machine.running->shuffles_of[index]++)) {
    return std::fill(values, std::end(values), value), body(values, int(lane));
  }
  memcpy(&machine.running->exchanged[index], &value, sizeof value);
  machine.wait(emulation::State::kAtWarpBarrier);
  memcpy(values, &machine.running->exchanged[index - lane], sizeof values);
  machine.wait(emulation::State::kAtWarpBarrier);
  return body(values, int(lane));
}

template <class T>
T __shfl_down_sync(unsigned, T value, int by) {
  return in_warp(value,
                 [=](const T* values, int lane) { return lane + by < emulation::kWarp ? values[lane + by] : value; });
}
template <class T>
T __shfl_sync(unsigned, T value, int from) {
  return in_warp(value, [=](const T* values, int) { return values[from]; });
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int by) {
  return in_warp(value, [=](const T* values, int lane) { return values[lane ^ by]; });
}
inline uint32_t __ballot_sync(unsigned, bool is_set) {
  return in_warp(uint32_t(is_set), [](const uint32_t* values, int) {
    uint32_t bits = 0;
    for (int lane = 0; lane < emulation::kWarp; ++lane) bits |= values[lane] << lane;
    return bits;
  });
}
// Of these it alone orders accesses of memory.
inline void __syncwarp() {
  __ballot_sync(0xffffffffu, true);
  const emulation::InMachine in_machine;
  auto& machine = emulation::Machine::get();
  ++machine.running->passed[machine.thread.x].warp;
}
inline int __popc(uint32_t bits) { return __builtin_popcount(bits); }
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
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t by) {
  return uint32_t((uint64_t(high) << 32 | low) >> (by & 31));
}

// c + the products of two numbers of 16 bits and two of 8, from the lower or the upper ones of four. Of int, all have
// signs.
inline int dot_product(int numbers, int bytes, int c) {
  const int products = int16_t(numbers) * int8_t(bytes) + int16_t(numbers >> 16) * int8_t(bytes >> 8);
  return int(uint32_t(c) + uint32_t(products));
}
inline int __dp2a_lo(int numbers, int bytes, int c) { return dot_product(numbers, bytes, c); }
inline int __dp2a_hi(int numbers, int bytes, int c) { return dot_product(numbers, bytes >> 16, c); }
inline uint32_t __dp2a_lo(uint32_t numbers, uint32_t bytes, uint32_t c) {
  return c + (numbers & 0xffff) * (bytes & 0xff) + (numbers >> 16) * (bytes >> 8 & 0xff);
}
inline uint32_t __dp2a_hi(uint32_t numbers, uint32_t bytes, uint32_t c) { return __dp2a_lo(numbers, bytes >> 16, c); }
inline uint32_t __dp4a(uint32_t a, uint32_t b, uint32_t c) {
  for (int shift = 0; shift < 32; shift += 8) c += (a >> shift & 0xff) * (b >> shift & 0xff);
  return c;
}

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }

// Other blocks may go on before each of these.
inline void take_turns() {
  const emulation::InMachine in_machine;
  emulation::Machine::get().offers = true;
  emulation::Machine::get().wait(emulation::State::kReady);
}
inline void __threadfence() {
  take_turns();
  const emulation::InMachine in_machine;
  auto& machine = emulation::Machine::get();
  if (machine.is_faulty && machine.lacks(&emulation::Missing::fence, machine.running->fences++)) return;
  machine.fence(*machine.running);
}
// This ticket lets the block go on as the last, whatever the others have taken.
inline bool skips_ticket() {
  const emulation::InMachine in_machine;
  auto& machine = emulation::Machine::get();
  return machine.is_faulty && machine.lacks(&emulation::Missing::ticket, machine.running->tickets++);
}
inline uint32_t atomicInc(uint32_t* to, uint32_t last) {
  take_turns();
  if (skips_ticket()) return last;
  return std::exchange(*to, *to >= last ? 0 : *to + 1);
}
inline bool __isGlobal(const void*) { return true; }
inline float __ldcg(const float* from) {
  const float value = *from;
  const emulation::InMachine in_machine;
  return emulation::Machine::get().read_global(from, value);
}

// ---- the host's side ------------------------------------------------------------------------------------------------

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInitializationError = 3,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchTimeout = 702,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
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
  return status == cudaErrorLaunchOutOfResources       ? "too many resources requested for launch"
         : status == cudaErrorLaunchTimeout            ? "threads wait for others at a barrier"
         : status == cudaErrorLaunchFailure            ? emulation::Machine::get().fault.c_str()
         : status == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
         : status == cudaErrorUnknown                  ? emulation::Machine::get().trouble.c_str()
                                                       : "an error";
}
// What is not a kernel's launch, and what only a thread that has asked for it may do while a graph is captured.
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal = 0, cudaStreamCaptureModeRelaxed = 2 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1 };
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const bool relaxed = std::exchange(emulation::Machine::get().is_relaxed, *mode == cudaStreamCaptureModeRelaxed);
  return *mode = relaxed ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal, cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  auto& machine = emulation::Machine::get();
  if (machine.is_captured(stream)) return cudaErrorStreamCaptureUnsupported;  // a replay would read the host's memory
  const char* const begin = static_cast<const char*>(from);
  machine.enqueue({stream, [=, copy = std::vector<char>(begin, begin + bytes)] { memcpy(to, copy.data(), bytes); }});
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  auto& machine = emulation::Machine::get();
  if (machine.capture != 0 && !machine.is_relaxed) return cudaErrorStreamCaptureUnsupported;
  machine.finish(stream);
  return cudaSuccess;
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
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                            unsigned long long* id) {
  const auto& machine = emulation::Machine::get();
  *id = machine.is_captured(stream) ? machine.capture : 0;
  *status = *id != 0 ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

// How the launches went that have been made since it was asked last.
inline cudaError_t launches_status() {
  auto& machine = emulation::Machine::get();
  const bool stuck = std::exchange(machine.stuck, false);
  return !machine.fault.empty() ? cudaErrorLaunchFailure : stuck ? cudaErrorLaunchTimeout : cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... given) {
  auto& machine = emulation::Machine::get();
  if (machine.launches_until_failure >= 0 && machine.launches_until_failure-- == 0) {
    return cudaErrorLaunchOutOfResources;
  }
  ++machine.launches;
  using Call = std::pair<void (*)(Parameters...), std::tuple<std::remove_cv_t<Parameters>...>>;
  static_assert(sizeof(Call::second) <= 32764, "a launch carries no more");
  const char* const types = __PRETTY_FUNCTION__;  // of all parameters
  const auto run = [&machine, config = *config, types, call = Call{kernel, {std::forward<Arguments>(given)...}}]() {
    machine.is_faulty = machine.missing.is_there && strstr(types, machine.missing.of.c_str()) != nullptr;
    machine.arguments = &call, machine.arguments_bytes = sizeof call;
    machine.body = [](const void* arguments) {
      const auto& [function, values] = *static_cast<const Call*>(arguments);
      std::apply(function, values);
    };
    machine.run_grid(config.gridDim.x, config.blockDim.x);
  };
  const emulation::Launch launch{config->stream, run};
  machine.fault.clear();
  machine.enqueue(launch);
  return launches_status();
}
