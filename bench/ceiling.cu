// What a GPU's memory gives for each mix of reads and writes: streaming kernels with next to no arithmetic. loops.py
// compiles this file for the GPU that it runs on, and keeps the fastest loop of each mix.
//
// A mix has up to four fp32 streams of n elements and one of 16 bits. Its loops differ in how much each thread has in
// flight, in cache hints, in the width of a thread's piece, in the size of a block, and in whether blocks stay (a
// persistent grid) or each does one tile.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

struct Streams {
  float *a, *b, *c, *d;  // d is only read, but for step_rewriting_grad
  const uint2* half;     // bf16, four of them each
  float limit;           // `read` adds sums above it to *sum: none when timed, all when checked
  float* sum;
};

// kQuads neighbouring groups of four elements; kStreaming: not to be kept in the caches.
template <int kQuads, bool kStreaming>
struct Access {
  struct Piece {
    float4 quads[kQuads];
  };

  __device__ static Piece load(const float* from, int64_t i) {
    Piece piece;
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      const float4* const at = reinterpret_cast<const float4*>(from) + i * kQuads + q;
      if constexpr (kStreaming) piece.quads[q] = __ldcs(at);
      else piece.quads[q] = *at;
    }
    return piece;
  }

  __device__ static Piece load(const uint2* from, int64_t i) {
    Piece piece;
    if constexpr (kQuads == 2) {
      const uint4* const at = reinterpret_cast<const uint4*>(from) + i;
      uint4 bits;
      if constexpr (kStreaming) bits = __ldcs(at);
      else bits = *at;
      piece.quads[0] = widen(bits.x, bits.y), piece.quads[1] = widen(bits.z, bits.w);
    } else {
      uint2 bits;
      if constexpr (kStreaming) bits = __ldcs(from + i);
      else bits = from[i];
      piece.quads[0] = widen(bits.x, bits.y);
    }
    return piece;
  }

  __device__ static void store(float* to, int64_t i, const Piece& piece) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float4* const at = reinterpret_cast<float4*>(to) + i * kQuads + q;
      if constexpr (kStreaming) __stcs(at, piece.quads[q]);
      else *at = piece.quads[q];
    }
  }

  __device__ static void store(uint2* to, int64_t i, const Piece& piece) {
    if constexpr (kQuads == 2) {
      const uint2 low = narrow(piece.quads[0]), high = narrow(piece.quads[1]);
      uint4* const at = reinterpret_cast<uint4*>(to) + i;
      if constexpr (kStreaming) __stcs(at, uint4{low.x, low.y, high.x, high.y});
      else *at = {low.x, low.y, high.x, high.y};
    } else {
      if constexpr (kStreaming) __stcs(to + i, narrow(piece.quads[0]));
      else to[i] = narrow(piece.quads[0]);
    }
  }

  // new <- old / 2 + grad
  __device__ static void blend(float* to, int64_t i, Piece old, const Piece& grad) {
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      float4& o = old.quads[q];
      const float4& g = grad.quads[q];
      o = {o.x * 0.5f + g.x, o.y * 0.5f + g.y, o.z * 0.5f + g.z, o.w * 0.5f + g.w};
    }
    store(to, i, old);
  }

  __device__ static void negate(float* to, int64_t i, Piece piece) {
#pragma unroll
    for (float4& q : piece.quads) q = {-q.x, -q.y, -q.z, -q.w};
    store(to, i, piece);
  }

 private:
  __device__ static float as_float(uint32_t bits) {
    union {
      uint32_t bits;
      float value;
    } both{bits};
    return both.value;
  }
  __device__ static uint32_t as_bits(float value) {
    union {
      float value;
      uint32_t bits;
    } both{value};
    return both.bits;
  }
  __device__ static float4 widen(uint32_t low, uint32_t high) {
    return {as_float(low << 16), as_float(low & 0xffff0000u), as_float(high << 16), as_float(high & 0xffff0000u)};
  }
  __device__ static uint2 narrow(const float4& q) {
    return {as_bits(q.x) >> 16 | (as_bits(q.y) & 0xffff0000u), as_bits(q.z) >> 16 | (as_bits(q.w) & 0xffff0000u)};
  }
};

// The mixes: how many streams each reads, what it loads for piece i, and what it then does with it.
template <class A>
struct Mix {
  using Piece = typename A::Piece;
  static constexpr int kReads = 1;
  float sum = 0;
};

template <class A>
struct Read : Mix<A> {
  struct Loaded {
    typename A::Piece d;
  };
  __device__ static Loaded load(const Streams& s, int64_t i) { return {A::load(s.d, i)}; }
  __device__ void finish(const Streams&, int64_t, const Loaded& in) {
    for (const float4& q : in.d.quads) this->sum += q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w;
  }
};

template <class A>
struct Scale : Mix<A> {
  struct Loaded {
    typename A::Piece a;
  };
  __device__ static Loaded load(const Streams& s, int64_t i) { return {A::load(s.a, i)}; }
  __device__ void finish(const Streams& s, int64_t i, const Loaded& in) { A::negate(s.a, i, in.a); }
};

template <class A>
struct Accumulate : Mix<A> {
  static constexpr int kReads = 2;
  struct Loaded {
    typename A::Piece a, d;
  };
  __device__ static Loaded load(const Streams& s, int64_t i) { return {A::load(s.a, i), A::load(s.d, i)}; }
  __device__ void finish(const Streams& s, int64_t i, const Loaded& in) { A::blend(s.a, i, in.a, in.d); }
};

template <class A>
struct AccumulateBf16 : Accumulate<A> {
  using typename Accumulate<A>::Loaded;
  __device__ static Loaded load(const Streams& s, int64_t i) { return {A::load(s.a, i), A::load(s.half, i)}; }
};

template <class A>
struct OverwriteBf16 : Mix<A> {
  struct Loaded {
    typename A::Piece d;
  };
  __device__ static Loaded load(const Streams& s, int64_t i) { return {A::load(s.half, i)}; }
  __device__ void finish(const Streams& s, int64_t i, const Loaded& in) { A::store(s.a, i, in.d); }
};

template <class A>
struct NarrowBf16 : Read<A> {
  using typename Read<A>::Loaded;
  __device__ void finish(const Streams& s, int64_t i, const Loaded& in) {
    A::store(reinterpret_cast<uint2*>(s.a), i, in.d);
  }
};

template <class A>
struct Step : Mix<A> {
  static constexpr int kReads = 4;
  struct Loaded {
    typename A::Piece a, b, c, d;
  };
  __device__ static Loaded load(const Streams& s, int64_t i) {
    return {A::load(s.a, i), A::load(s.b, i), A::load(s.c, i), A::load(s.d, i)};
  }
  __device__ void finish(const Streams& s, int64_t i, const Loaded& in) {
    A::blend(s.a, i, in.a, in.d);
    A::blend(s.b, i, in.b, in.d);
    A::blend(s.c, i, in.c, in.d);
  }
};

template <class A>
struct StepRewritingGrad : Step<A> {
  using typename Step<A>::Loaded;
  __device__ void finish(const Streams& s, int64_t i, const Loaded& in) {
    Step<A>::finish(s, i, in);
    A::negate(s.d, i, in.d);
  }
};

constexpr int kMaxThreads = 512;

// `pieces` is a multiple of a tile: kUnroll pieces for each of the block's threads.
template <class Mix, int kUnroll>
__global__ void __launch_bounds__(kMaxThreads) stream(const Streams s, const int64_t pieces, const int threads) {
  Mix mix;
  const int64_t tile = int64_t(threads) * kUnroll;
  for (int64_t begin = blockIdx.x * tile; begin < pieces; begin += gridDim.x * tile) {
    typename Mix::Loaded loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) loaded[u] = Mix::load(s, begin + u * threads + threadIdx.x);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) mix.finish(s, begin + u * threads + threadIdx.x, loaded[u]);
  }
  if (mix.sum > s.limit) atomicAdd(s.sum, mix.sum);
}

template <class Mix, int kQuads, int kInFlight>
cudaError_t launch(bool persistent, int threads, const Streams& s, int64_t n, cudaStream_t queue) {
  constexpr int kFits = kInFlight / (Mix::kReads * kQuads), kUnroll = kFits > 1 ? kFits : 1;
  const auto kernel = stream<Mix, kUnroll>;
  const int64_t pieces = n / (4 * kQuads);
  int64_t blocks = pieces / (threads * kUnroll);
  if (persistent) {
    int device = 0, multiprocessors = 0, resident = 0;
    cudaError_t status = cudaGetDevice(&device);
    if (!status) status = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (!status) status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, threads, 0);
    if (status) return status;
    if (blocks > multiprocessors * resident) blocks = multiprocessors * resident;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(blocks));
  config.blockDim = dim3(unsigned(threads));
  config.stream = queue;
  return cudaLaunchKernelEx(&config, kernel, s, pieces, threads);
}

template <template <class> class M, int kQuads, bool kStreaming>
cudaError_t launch(int in_flight, bool persistent, int threads, const Streams& s, int64_t n, cudaStream_t queue) {
  using A = Access<kQuads, kStreaming>;
  switch (in_flight) {
    case 0: return launch<M<A>, kQuads, 4>(persistent, threads, s, n, queue);
    case 1: return launch<M<A>, kQuads, 8>(persistent, threads, s, n, queue);
    default: return launch<M<A>, kQuads, 16>(persistent, threads, s, n, queue);
  }
}

constexpr int kLoops = 3 * 2 * 2 * 2 * 2;

template <template <class> class M>
cudaError_t run(int loop, const Streams& s, int64_t n, cudaStream_t queue) {
  const int in_flight = loop % 3, choice = loop / 3;
  const bool persistent = choice & 1;
  const int threads = choice & 2 ? kMaxThreads : kMaxThreads / 2;
  switch (choice >> 2) {
    case 0: return launch<M, 1, false>(in_flight, persistent, threads, s, n, queue);
    case 1: return launch<M, 1, true>(in_flight, persistent, threads, s, n, queue);
    case 2: return launch<M, 2, false>(in_flight, persistent, threads, s, n, queue);
    default: return launch<M, 2, true>(in_flight, persistent, threads, s, n, queue);
  }
}

}  // namespace

extern "C" {

int loops() { return kLoops; }

// n: a multiple of 65536. Returns CUDA's error code; a launch's errors otherwise show at the next synchronization.
#define MIX(name, M)                                                                                                \
  int mix_##name(int loop, int64_t n, void* queue, float* a, float* b, float* c, float* d, void* half, float limit, \
                 float* sum) {                                                                                      \
    return run<M>(loop, {a, b, c, d, static_cast<const uint2*>(half), limit, sum}, n,                               \
                  static_cast<cudaStream_t>(queue));                                                                \
  }

MIX(read, Read)
MIX(scale, Scale)
MIX(accumulate, Accumulate)
MIX(accumulate_bf16, AccumulateBf16)
MIX(overwrite_bf16, OverwriteBf16)
MIX(narrow_bf16, NarrowBf16)
MIX(step, Step)
MIX(step_rewriting_grad, StepRewritingGrad)

const char* reason(int status) { return cudaGetErrorString(static_cast<cudaError_t>(status)); }
}
