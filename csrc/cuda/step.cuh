// Step: one pass over gradients, parameters and states. The arithmetic is in rules.h.
#pragma once
#include <type_traits>

#include "../rules.h"
#include "block.cuh"
#include "packet.cuh"
#include "step_formatted.cuh"
#include "step_packed.cuh"

namespace accumfused::AF_TARGET {

// Of the groups that a launch steps.
struct Hypers {
  int first_group;
  int stride;
  HyperParameter values[Policy::kCarriedHypers];

  __device__ double value(int group, int index) const { return values[(group - first_group) * stride + index].value(); }
};

// A rule's scalars cost two powers in double, so one thread computes them for the block, and pieces share them.
struct Prepared {
  int group;
  int count;
  int row;  // -1 where rows share it
  float outcome[3];
  double hyper[kMaxHypers];
  alignas(16) unsigned char rule[kMaxFunctorBytes];
};

// W: weights that need no noise. kWhole: whole rows alone. How many elements were updated.
template <class W, bool kWhole, class Rule, class G>
__device__ int step_chunk(const Rule& rule, const Piece& at, const G* grad, bool aligned) {
  const WeightStreams<W> weights(at);
  float* state[kMaxStates];
  aligned = aligned && weights.lie_on_boundaries();
#pragma unroll
  for (int s = 0; s < Rule::kStates; ++s) {
    state[s] = global(static_cast<float*>(at.row.state[s]) + at.offset);
    aligned = aligned && is_aligned(state[s], 4);
  }
  constexpr int kRows = Policy::kStepRows<Rule::kStates>;
  const int n = at.n;
  const auto update = [&](auto access, int i) {
    constexpr int kCount = decltype(access)::kCount;
    float p[kCount][kWidth], g[kCount][kWidth], s[kMaxStates][kCount][kWidth];
    access.load(grad, i, n, g);
    weights.load(access, i, n, p);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) access.load(state[k], i, n, s[k]);
#pragma unroll
    for (int r = 0; r < kCount; ++r) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        apply(rule, p[r][k], g[r][k], [&](int j) -> float& { return s[j][r][k]; });
#pragma unroll
        for (int j = 0; j < Rule::kStates; ++j) s[j][r][k] = flush_subnormal(s[j][r][k]);
      }
    }
    weights.store(access, i, n, p);
#pragma unroll
    for (int k = 0; k < Rule::kStates; ++k) access.store(state[k], i, n, s[k]);
  };
  if constexpr (kWhole) return for_each_whole_row<kRows>(n, aligned, update);
  for_each_row<kRows>(n, aligned, update);
  return n;
}

// What a kernel is for: rows in fp32, or rows in any format.
enum class Kind { kPlain, kAny };

template <Kind kKind, class Rule>
__device__ void step_any(const Rule& rule, const Work& work, int piece, const Piece& at, int count) {
  int done = 0;
  const auto step_floats = [&](auto weights) {
    with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
      done = step_chunk<decltype(weights), kKind != Kind::kPlain>(rule, at, grad, aligned);
    });
  };
  if constexpr (kKind == Kind::kPlain) {
    step_floats(Float32Weights());
  } else {
    if (at.row.is_plain()) {
      step_floats(Float32Weights());
    } else if (at.row.states == States::kFloat32 && at.row.weights == Weights::kBfloat16Split16) {
      step_floats(Split16Weights());
    } else if constexpr (kIsPacked<Rule>) {
      done = step_packed(rule, at, count);
    }
    if (done == at.n) return;
    const Piece rest = piece_of(work, piece);  // looked up again: nothing of it takes registers in the loops above
    step_formatted(rule, rest, count, done);
  }
}

// Steps rows of groups that have this rule. `coefficients`: nullable, each row's.
template <Kind kKind, class Rule>
__global__ void __launch_bounds__(Policy::kThreads, Policy::kStepBlocks<Rule::kStates>)
    step_kernel(const Work work, const __grid_constant__ Hypers hypers, const float* outcome,
                const float* coefficients) {
  static_assert(sizeof(Rule) <= kMaxFunctorBytes && Rule::kHypers <= kMaxHypers, "Prepared is too small");
  __shared__ Prepared prepared;
  if (threadIdx.x == 0) prepared.group = -1;
  if (threadIdx.x < 3) prepared.outcome[threadIdx.x] = outcome[threadIdx.x];
  __syncthreads();
  if (prepared.outcome[2] != 0.0f) return;  // skipped: nothing is written
  // Backwards: of the gradients, which the norm has read forwards, the last ones may still be in the cache.
  for (int piece = work.pieces - 1 - int(blockIdx.x); piece >= 0; piece -= int(gridDim.x)) {
    const Piece at = piece_of(work, work.first_piece + piece);
    const int group = int(at.row.group);
    // Volatile, or the compiler asks for it only when the gradient's word is there. A row without a step has none.
    const float before = *const_cast<const volatile float*>(work.counts + at.index);
    if (at.in.grad == nullptr) continue;
    const int count = at.row.step ? int(whole_steps(before)) + 1 : 0;
    const int row = coefficients ? int(at.index) : -1;
    if (group != prepared.group || count != prepared.count || row != prepared.row) {
      if (threadIdx.x < Rule::kHypers) {  // each waits for memory, so all at once
        prepared.hyper[threadIdx.x] = hypers.value(group, int(threadIdx.x));
      }
      __syncthreads();  // some threads may still be taking the one before
      if (threadIdx.x == 0) {
        new (prepared.rule) Rule(prepared.hyper, count, coefficients ? coefficients[row] : prepared.outcome[0]);
        prepared.group = group, prepared.count = count, prepared.row = row;
      }
      __syncthreads();
    }
    step_any<kKind>(*reinterpret_cast<const Rule*>(prepared.rule), work, work.first_piece + piece, at, count);
  }
  for_each_count(work, first_counted(), [&](int i, const Row& row) {
    if (work.words[i] != 0) *row.step = work.counts[i] + 1.0f;
  });
}

}  // namespace accumfused::AF_TARGET
