// The step of parameters and states in any format, one loop for all.
#pragma once
#include <utility>

#include "block.cuh"
#include "formats.cuh"

namespace accumfused::AF_TARGET {

// Lets a loop read scalars from memory in every pass: registers are dearer there.
__device__ inline void read_anew() { asm volatile("" ::: "memory"); }

// Calls the rule with as many states as it has; state(k) is a reference.
template <class Rule, class State, size_t... k>
__device__ void apply(const Rule& rule, float& p, float g, const State& state, std::index_sequence<k...>) {
  rule(p, g, state(k)...);
}

template <class Rule, class State>
__device__ void apply(const Rule& rule, float& p, float g, const State& state) {
  apply(rule, p, g, state, std::make_index_sequence<Rule::kStates>());
}

// A chunk from its element `first` on; a quantisation block begins there.
template <class Rule>
__device__ void step_formatted(const Rule& rule, const Piece& at, int count, int first) {
  constexpr int kStates = Rule::kStates;
  const Row& row = at.row;
  const Noise noise(row, at.index, count, at.offset - at.in_chunk());
  const uint64_t begin = noise.position(uint32_t(at.in_chunk()) / 2);
  // A warp goes on while one of its threads has elements: it takes all of them to find the largest element.
#pragma unroll 1
  for (int block = first + int(threadIdx.x) / kWarp * int(kQuantBlock); block < at.n; block += int(kLanes)) {
    const int i = block + int(threadIdx.x) % kWarp * kWidth;
    read_anew();
    const Raw<4> grad(at, at.in.grad, at.in.grad_dtype == Dtype::kFloat32 ? 4 : 2, i);
    const RawWeights weights(at, i);
    const int bytes = row.states == States::kFloat32 ? 4 : row.states == States::kBfloat16 ? 2 : 1;
    const auto state = [&](int k) { return Raw<4>(at, row.state[k], k < kStates ? bytes : 0, i); };
    const Raw<4> raw[kMaxStates] = {state(0), state(1), state(2), state(3)};
    uint32_t exponent[kMaxStates] = {}, bits[kWidth] = {};
#pragma unroll
    for (int k = 0; k < kStates; ++k) {
      if (row.states == States::kInt8) exponent[k] = global(row.scale[k])[(at.offset + block) / kQuantBlock];
    }

    read_anew();
    float g[kWidth], p[kWidth], s[kMaxStates][kWidth];
    if (at.in.grad_dtype == Dtype::kFloat32) grad.to_floats<float>(g);
    else if (at.in.grad_dtype == Dtype::kFloat16) grad.to_floats<Float16>(g);
    else grad.to_floats<Bfloat16>(g);
    with_weights(row.weights, [&](auto form) { weights.join<decltype(form)>(p); });
    if constexpr (kStates > 0) decode_state<Rule::kFirstSecondMoment == 0>(row.states, raw[0], exponent[0], s[0]);
    if constexpr (kStates > 1) decode_state<Rule::kFirstSecondMoment <= 1>(row.states, raw[1], exponent[1], s[1]);
    if constexpr (kStates > 2) decode_state<Rule::kFirstSecondMoment <= 2>(row.states, raw[2], exponent[2], s[2]);
    if constexpr (kStates > 3) decode_state<Rule::kFirstSecondMoment <= 3>(row.states, raw[3], exponent[3], s[3]);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) apply(rule, p[k], g[k], [&](int j) -> float& { return s[j][k]; });
    if (row.seed != nullptr) draw(begin + uint32_t(i / 2) * Noise::kStride, row.origin % 2 != 0, bits);
    with_weights(row.weights, [&](auto form) { store_weights<decltype(form)>(at, i, p, bits); });
    if constexpr (kStates > 0) store_state<Rule::kFirstSecondMoment == 0, 0>(at, 0, i, s[0], bits);
    if constexpr (kStates > 1) store_state<Rule::kFirstSecondMoment <= 1, 1>(at, 1, i, s[1], bits);
    if constexpr (kStates > 2) store_state<Rule::kFirstSecondMoment <= 2, 1>(at, 2, i, s[2], bits);
    if constexpr (kStates > 3) store_state<Rule::kFirstSecondMoment <= 3, 1>(at, 3, i, s[3], bits);
  }
}

}  // namespace accumfused::AF_TARGET
