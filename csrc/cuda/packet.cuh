// The way of the tables to the device.
#pragma once
#include "policy.h"

namespace accumfused::AF_TARGET {

// A piece of the tables, carried by the launch itself: no staging memory that an earlier launch may still read, nothing
// to wait for, and a captured graph keeps its own.
template <int kBytes>
struct Packet {
  uint4 bytes[kBytes / sizeof(uint4)];
};

template <int kBytes>
__global__ void __launch_bounds__(Policy::kThreads)
    write_kernel(const __grid_constant__ Packet<kBytes> packet, uint4* to, int count) {
  for (int i = int(blockIdx.x * Policy::kThreads + threadIdx.x); i < count; i += int(gridDim.x) * Policy::kThreads)
    to[i] = packet.bytes[i];
}

}  // namespace accumfused::AF_TARGET
