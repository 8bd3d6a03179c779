// One source, several builds: AF_TARGET names the namespace of the build (an instruction set, or `gpu`). With one name
// for all, a functor would be one weak symbol, and the linker might keep the AVX-512 copy for everybody.
#pragma once

#if defined(__CUDACC__)
#define AF_INLINE static __host__ __device__ __forceinline__
#define AF_METHOD __host__ __device__ __forceinline__
#else
#define AF_INLINE static inline __attribute__((always_inline))
#define AF_METHOD inline __attribute__((always_inline))
#endif
