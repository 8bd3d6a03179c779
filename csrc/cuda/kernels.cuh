// The three verbs on a GPU: each one launch, whatever the number of tensors. A persistent grid: block b takes the
// chunks b, b + gridDim.x, ... of all tensors, found by search in the rows' prefix sums. The arithmetic is in rules.h
// and norm.h, the geometry in block.cuh.
#pragma once
#include "../norm.h"
#include "../rules.h"
#include "block.cuh"

namespace accumfused::AF_TARGET {

struct Work {
  const Row* rows;
  const Operands* operands;
  int64_t count;
  int chunks;        // over all rows; 2^31 of them would be 2^46 elements
  uint32_t* ticket;  // 0 between launches
};

// One chunk, the same for all threads of the block.
struct Chunk {
  const Row& row;
  const Operands& in;
  int64_t offset;
  int n;

  __device__ Chunk(const Work& work, int chunk) : Chunk(work, chunk, row_of(work.rows, work.count, chunk)) {}

 private:
  __device__ Chunk(const Work& work, int chunk, int64_t index)
      : row(work.rows[index]), in(work.operands[index]), offset((chunk - row.first_chunk) * kChunk) {
    const int64_t left = row.numel - offset;
    n = int(left < kChunk ? left : kChunk);
  }
};

// ---- norm -----------------------------------------------------------------------------------------------------------

// `reads`: there are gradients whose sums of squares are missing from partials.
__global__ void __launch_bounds__(kThreads, 4) norm_kernel(const Work work, const bool reads, float* partials,
                                                           const Scaling scaling, float* outcome, int64_t* skips) {
  for (int chunk = int(blockIdx.x); reads && chunk < work.chunks; chunk += int(gridDim.x)) {
    const Chunk at(work, chunk);
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

__global__ void __launch_bounds__(kThreads, 4) accumulate_kernel(const Work work, const Fold fold) {
  const double scale = fold.device_scale ? fold.scale * *fold.device_scale : fold.scale;
  const float add = float(fold.weights[fold.weight] * scale);
  for (int chunk = int(blockIdx.x); chunk < work.chunks; chunk += int(gridDim.x)) {
    const Chunk at(work, chunk);
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

template <class Rule, class G>
__device__ void step_chunk(const Rule& rule, const Chunk& at, const G* grad, bool aligned) {
  float* const param = global(at.row.param + at.offset);
  float* state[kMaxStates];
  aligned = aligned && is_aligned(param, 4);
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) {
    state[s] = global(at.row.state[s] + at.offset);
    aligned = aligned && is_aligned(state[s], 4);
  }
  constexpr int kRows = Rule::kStates < 2 ? 2 : 1;  // with its three or four streams enough is in flight
  const int n = at.n;
  for_each_row<kRows>(n, aligned, [&](auto access, int i) {
    constexpr int kCount = decltype(access)::kCount;
    float p[kCount][kWidth], g[kCount][kWidth], s[kMaxStates][kCount][kWidth];
    access.load(grad, i, n, g);
    access.load(param, i, n, p);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) access.load(state[k], i, n, s[k]);
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) rule(p[r][k], g[r][k], s[0][r][k], s[1][r][k], s[2][r][k]);
    }
    access.store(param, i, n, p);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) access.store(state[k], i, n, s[k]);
  });
}

// Calls body with a pointer of the type of the rule of that index among Rules.
template <class Rule, class... Others, class Body>
__device__ void with_rule(int index, const Body& body) {
  if constexpr (sizeof...(Others) == 0) {
    body(static_cast<const Rule*>(nullptr));
  } else {
    if (index == 0) body(static_cast<const Rule*>(nullptr));
    else with_rule<Others...>(index - 1, body);
  }
}

// For one rule; or for groups that differ in theirs, for all of them.
template <class... Rules>
__global__ void __launch_bounds__(kThreads, 4) step_kernel(const Work work, const Hypers hypers, const float* outcome) {
  if (outcome[2] != 0.0f) return;  // skipped: nothing is written
  __shared__ Prepared prepared;
  if (threadIdx.x == 0) prepared.group = -1;
  __syncthreads();
  for (int chunk = int(blockIdx.x); chunk < work.chunks; chunk += int(gridDim.x)) {
    const Chunk at(work, chunk);
    if (at.in.grad == nullptr) continue;
    const int group = int(at.row.group), count = at.row.step ? int(whole_steps(*at.row.step)) + 1 : 0;
    const bool is_new = group != prepared.group || count != prepared.count;
    with_rule<Rules...>(hypers.rules[group], [&](auto* type) {
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
      with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) { step_chunk(rule, at, grad, aligned); });
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
