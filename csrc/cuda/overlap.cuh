// Launches overlap on compute capability 9.0 and newer ("programmatic dependent launch"): a step begins while the norm,
// or another launch of ours in front of it, ends, and waits here for its writes. What starting takes is done by then.
// Behind kernels of others no launch begins early: one that waited for nothing itself could end before those in front.
#pragma once

namespace accumfused::AF_TARGET {

// First of all in every kernel: all memory that it reads may be written by the launches in front of it, the table's
// rows too, and all that it writes may be read by them.
__device__ inline void wait_for_launches_in_front() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#elif !defined(__CUDACC__)
  cudaGridDependencySynchronize();  // the emulation's
#endif
}

// Lets the next launch begin when all thread blocks of this one are here. Only behind the wait, so that the next one's
// wait is for all launches in front; and only where our own kernels follow: another's might read parameters before it
// waits, as some that only infer do.
__device__ inline void let_next_launch_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

}  // namespace accumfused::AF_TARGET
