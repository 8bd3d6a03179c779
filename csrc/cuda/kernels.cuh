// The three verbs on a GPU: each one launch, whatever the number of tensors. A persistent grid: block b takes the
// chunks b, b + gridDim.x, ... of all tensors, found by search in the rows' prefix sums. The arithmetic is in rules.h
// and norm.h, the geometry in block.cuh.
#pragma once
#include <type_traits>

#include "../norm.h"
#include "../rules.h"
#include "block.cuh"
#include "formats.cuh"
#include "packed_adam.cuh"

namespace accumfused::AF_TARGET {

struct Work {
  const Row* rows;
  const Operands* operands;
  int64_t count;
  int chunks;        // over all rows; 2^31 of them would be 2^46 elements
  uint32_t* ticket;  // 0 between launches
};

__device__ inline Chunk chunk_of(const Work& work, int chunk) {
  const int64_t index = row_of(work.rows, work.count, chunk);
  const Row& row = work.rows[index];
  const int64_t offset = (chunk - row.first_chunk) * kChunk, left = row.numel - offset;
  return {row, work.operands[index], index, offset, int(left < kChunk ? left : kChunk)};
}

// ---- norm -----------------------------------------------------------------------------------------------------------

// `reads`: there are gradients whose sums of squares are missing from partials.
__global__ void __launch_bounds__(kThreads, 4) norm_kernel(const Work work, const bool reads, float* partials,
                                                           const Scaling scaling, float* outcome, int64_t* skips) {
  for (int chunk = int(blockIdx.x); reads && chunk < work.chunks; chunk += int(gridDim.x)) {
    const Chunk at = chunk_of(work, chunk);
    if (at.in.grad == nullptr) continue;
    float lanes[kWidth] = {};
    with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
      for_each_row<4>(at.n, aligned, [&](auto access, int i) {
        float g[access.kCount][kWidth];
        access.load(grad, i, at.n, g);
#pragma unroll
        for (int r = 0; r < access.kCount; ++r) {
#pragma unroll
          for (int k = 0; k < kWidth; ++k) lanes[k] += g[r][k] * g[r][k];
        }
      });
    });
    store_sum(lanes, partials + chunk);
  }
  if (!is_last_block(work.ticket)) return;
  const double sum = scaling.takes_norm ? sum_partials_in_block(partials, work.chunks) : 0.0;
  if (threadIdx.x == 0) finish_norm(scaling, sum, outcome, skips);
}

// ---- accumulate -----------------------------------------------------------------------------------------------------

// See cpu/kernels.h: accumulator <- (w[held] * scale) * accumulator + (w[weight] * scale) * grad.
struct Fold {
  const double* weights;
  int64_t weight;
  double scale;
  const double* device_scale;  // nullable; multiplies `scale`
  float* partials;
};

template <bool kKeep, bool kAdd, class G>
__device__ void fold_chunk(float* accumulator, const G* grad, int n, bool aligned, float keep, float add, float* sum) {
  float lanes[kWidth] = {};
  for_each_row<2>(n, aligned && is_aligned(accumulator, 4), [&](auto access, int i) {
    float value[access.kCount][kWidth];
    [[maybe_unused]] float g[access.kCount][kWidth];
    if constexpr (kKeep) access.load(accumulator, i, n, value);
    if constexpr (kAdd) access.load(grad, i, n, g);
#pragma unroll
    for (int r = 0; r < access.kCount; ++r) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float folded = 0.0f;
        if constexpr (kKeep) folded = value[r][k] * keep;
        if constexpr (kAdd) folded = kKeep ? folded + g[r][k] * add : g[r][k] * add;
        value[r][k] = folded;
        lanes[k] += folded * folded;
      }
    }
    access.store(accumulator, i, n, value);
  });
  store_sum(lanes, sum);
}

// Blocks of folds on a multiprocessor; 7.5 has no room for more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kFolding = 4;
#else
constexpr int kFolding = 5;
#endif

__global__ void __launch_bounds__(kThreads, kFolding) accumulate_kernel(const Work work, const Fold fold) {
  const double scale = fold.device_scale ? fold.scale * *fold.device_scale : fold.scale;
  const float add = float(fold.weights[fold.weight] * scale);
  for (int chunk = int(blockIdx.x); chunk < work.chunks; chunk += int(gridDim.x)) {
    const Chunk at = chunk_of(work, chunk);
    if (at.in.accumulator == nullptr) continue;
    float* const accumulator = global(at.in.accumulator + at.offset);
    float* const sum = fold.partials + chunk;
    const int n = at.n;
    if (at.in.weight == kOverwrite) {
      with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
        for_each_row<2>(n, aligned && is_aligned(accumulator, 4), [&](auto access, int i) {
          float g[access.kCount][kWidth];
          access.load(grad, i, n, g);
          access.store(accumulator, i, n, g);
        });
      });
      continue;
    }
    const float keep = float(fold.weights[at.in.weight] * scale);
    if (at.in.grad == nullptr || add == 0.0f) {
      if (keep != 0.0f) fold_chunk<true, false>(accumulator, accumulator, n, true, keep, add, sum);
      else fold_chunk<false, false>(accumulator, accumulator, n, true, keep, add, sum);
      continue;
    }
    with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
      if (keep != 0.0f) fold_chunk<true, true>(accumulator, grad, n, aligned, keep, add, sum);
      else fold_chunk<false, true>(accumulator, grad, n, aligned, keep, add, sum);
    });
  }
}

// ---- step -----------------------------------------------------------------------------------------------------------

// A hyper-parameter: a number of the launch, or one that the device holds and a graph's replay reads anew.
struct Hyper {
  double number;
  const float* device_float;
  const double* device_double;

  __device__ double value() const {
    return device_float ? double(*device_float) : device_double ? *device_double : number;
  }
};

struct Hypers {
  const Hyper* values;   // [groups][stride]
  const int32_t* rules;  // [groups], indices into AF_RULES
  int stride;
};

constexpr int kMaxHypers = 8;

// A rule's scalars cost two powers in double, so one thread computes them for the block, and chunks share them.
struct Prepared {
  int group;
  int count;
  double hyper[kMaxHypers];
  alignas(16) unsigned char rule[64];
};

// W: weights that need no noise. kWhole: whole rows alone. How many elements were updated.
template <class W, bool kWhole, class Rule, class G>
__device__ int step_chunk(const Rule& rule, const Chunk& at, const G* grad, bool aligned) {
  const WeightStreams<W> weights(at);
  float* state[kMaxStates];
  aligned = aligned && weights.lie_on_boundaries();
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) {
    state[s] = global(static_cast<float*>(at.row.state[s]) + at.offset);
    aligned = aligned && is_aligned(state[s], 4);
  }
  constexpr int kRows = Rule::kStates < 2 ? 2 : 1;  // with its three or four streams enough is in flight
  const int n = at.n;
  const auto update = [&](auto access, int i) {
    constexpr int kCount = decltype(access)::kCount;
    if constexpr (Rule::kStates > 2) read_anew();  // or some would be spilled
    float p[kCount][kWidth], g[kCount][kWidth], s[kMaxStates][kCount][kWidth];
    access.load(grad, i, n, g);
    weights.load(access, i, n, p);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) access.load(state[k], i, n, s[k]);
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        rule(p[r][k], g[r][k], s[0][r][k], s[1][r][k], s[2][r][k]);
#pragma unroll
        for (int j = 0; j < Rule::kStates; ++j) s[j][r][k] = flush_subnormal(s[j][r][k]);
      }
    }
    weights.store(access, i, n, p);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) access.store(state[k], i, n, s[k]);
  };
  if constexpr (kWhole) return for_each_whole_row<kRows>(n, aligned, update);
  for_each_row<kRows, (Rule::kStates > 2)>(n, aligned, update);
  return n;
}

// What a kernel is for: rows in fp32; rows in any format; the same, with loops for the formats that go with Adam.
enum class Kind { kPlain, kAny, kPacked };

template <Kind kKind, class Rule>
__device__ void step_any(const Rule& rule, const Work& work, int chunk, const Chunk& at, int count) {
  [[maybe_unused]] int done = 0;
  [[maybe_unused]] const auto step_floats = [&](auto weights) {
    with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
      done = step_chunk<decltype(weights), kKind != Kind::kPlain>(rule, at, grad, aligned);
    });
  };
  if constexpr (kKind == Kind::kPlain) {
    step_floats(Float32Weights());
  } else if constexpr (kKind == Kind::kAny) {
    step_formatted(rule, at, count, 0);
  } else {
    if (at.row.is_plain()) {
      step_floats(Float32Weights());
    } else if (at.row.states == States::kFloat32 && at.row.weights == Weights::kBfloat16Split16) {
      step_floats(Split16Weights());
    } else {
      done = step_packed(rule, at, count);
    }
    if (done == at.n) return;
    const Chunk rest = chunk_of(work, chunk);  // looked up again: nothing of it takes registers in the loops above
    step_formatted(rule, rest, count, done);
  }
}

// For one rule; or for groups that differ in theirs, for all of them.
template <Kind kKind, class... Rules>
__global__ void __launch_bounds__(kThreads, 4) step_kernel(const Work work, const Hypers hypers, const float* outcome) {
  if (outcome[2] != 0.0f) return;  // skipped: nothing is written
  __shared__ Prepared prepared;
  if (threadIdx.x == 0) prepared.group = -1;
  __syncthreads();
  for (int chunk = int(blockIdx.x); chunk < work.chunks; chunk += int(gridDim.x)) {
    const Chunk at = chunk_of(work, chunk);
    if (at.in.grad == nullptr) continue;
    const int group = int(at.row.group), count = at.row.step ? int(whole_steps(*at.row.step)) + 1 : 0;
    const bool is_new = group != prepared.group || count != prepared.count;
    with_type<Rules...>(hypers.rules[group], [&](auto* type) {
      using Rule = std::remove_const_t<std::remove_pointer_t<decltype(type)>>;
      static_assert(sizeof(Rule) <= sizeof prepared.rule && Rule::kHypers <= kMaxHypers, "Prepared is too small");
      if (is_new) {
        __syncthreads();  // some threads may still be taking the one before
        if (threadIdx.x == 0) {
          for (int k = 0; k < Rule::kHypers; ++k) {
            prepared.hyper[k] = hypers.values[group * hypers.stride + k].value();
          }
          new (prepared.rule) Rule(prepared.hyper, count, outcome[0]);
          prepared.group = group, prepared.count = count;
        }
        __syncthreads();
      }
      const Rule& rule = *reinterpret_cast<const Rule*>(prepared.rule);
      step_any<kKind>(rule, work, chunk, at, count);
    });
  }
  if (!is_last_block(work.ticket)) return;
  for (int64_t i = threadIdx.x; i < work.count; i += kThreads) {
    if (work.operands[i].grad && work.rows[i].step) *work.rows[i].step += 1.0f;
  }
}

// ---- tables ---------------------------------------------------------------------------------------------------------

// A piece of the tables, carried by the launch itself: no staging memory that an earlier launch may still read, nothing
// to wait for, and a captured graph keeps its own.
template <int kBytes>
struct Packet {
  uint4 bytes[kBytes / sizeof(uint4)];
};

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    write_kernel(const __grid_constant__ Packet<kBytes> packet, uint4* to, int count) {
  for (int i = int(blockIdx.x * kThreads + threadIdx.x); i < count; i += int(gridDim.x) * kThreads)
    to[i] = packet.bytes[i];
}

}  // namespace accumfused::AF_TARGET
