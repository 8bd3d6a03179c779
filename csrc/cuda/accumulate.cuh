// Accumulate: folds gradients into accumulators, and sums the squares of the result.
#pragma once
#include "block.cuh"
#include "packed.cuh"
#include "packet.cuh"

namespace accumfused::AF_TARGET {

// How results become numbers of bf16: by a chunk's noise, or to nearest.
struct Rounding {
  bool is_noisy, is_odd;
  uint64_t begin;  // the position of the chunk's first pair

  __device__ void operator()(int i, float (&value)[kWidth]) const {
    uint32_t bits[kWidth];
    if (is_noisy) draw(begin + uint32_t(i / 2) * Noise::kStride, is_odd, bits);
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      value[k] = to_float(is_noisy ? to_bfloat16(value[k], bits[k]) : to_bfloat16(value[k]));
    }
  }
};

struct Exact {
  __device__ void operator()(int, float (&)[kWidth]) const {}
};

// sum <- (sum if kKeep) + (factor * grad if kAdd), rounded. From element `first` of the thread on.
template <bool kKeep, bool kAdd, class S, class G, class Rounding>
__device__ void fold_chunk(S* sum, const G* grad, int n, bool aligned, float factor, const Rounding& round, int first,
                           float (&lanes)[kWidth]) {
  const auto fold = [&](auto access, int i) {
    float value[access.kCount][kWidth];
    [[maybe_unused]] float g[access.kCount][kWidth];
    if constexpr (kKeep) access.load(sum, i, n, value);
    if constexpr (kAdd) access.load(grad, i, n, g);
#pragma unroll
    for (int r = 0; r < access.kCount; ++r) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) {
        float folded = kKeep ? value[r][k] : 0.0f;
        if constexpr (kAdd) folded = kKeep ? folded + g[r][k] * factor : g[r][k] * factor;
        value[r][k] = folded;
      }
      round(i + r * int(kLanes), value[r]);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) lanes[k] += value[r][k] * value[r][k];
    }
    access.store(sum, i, n, value);
  };
  constexpr int kRows = std::is_same_v<S, float> ? Policy::kFoldRows : 1;
  for_each_row<kRows>(n, aligned && is_aligned(sum, sizeof(S)), fold, first);
}

// Whole pairs of rows of sums and gradients in bf16, in accesses of 16 bytes: half a warp has 8 neighbours each of the
// first row, the other half of the second one. Of both, a thread adds the squares of four lanes, from place() on, which
// the halves exchange. How many elements that were.
template <bool kKeep, bool kNoisy>
__device__ int fold_pairs(Bfloat16* sum, const Bfloat16* grad, int n, float factor, const Rounding& round,
                          float (&lanes)[kWidth]) {
  constexpr int kHalf = kWarp / 2, kPair = 2 * int(kLanes), kQuad = kEight / 2;
  if (round.is_odd || !is_aligned(sum, 4) || !is_aligned(grad, 4)) return 0;
  const int warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const bool is_second = lane >= kHalf;
  const auto fold = [&](auto count, int i) {
    constexpr int kPairs = decltype(count)::value;
    uint32_t old[kPairs][kQuad] = {}, g[kPairs][kQuad];
#pragma unroll
    for (int p = 0; p < kPairs; ++p) {  // all are asked for before one is waited for
      if constexpr (kKeep) load_words(sum + i + p * kPair, old[p]);
      load_words(grad + i + p * kPair, g[p]);
    }
#pragma unroll
    for (int p = 0; p < kPairs; ++p, i += kPair) {
      uint32_t out[kQuad];
#pragma unroll
      for (int w = 0; w < kQuad; ++w) {
        const uint64_t noise = kNoisy ? Noise::at(round.begin + uint32_t(i / 2 + w) * Noise::kStride) : 0;
        const auto folded = [&](uint32_t s, uint32_t in, uint32_t bits) {
          const float value = float_from_bits(in) * factor;
          const float sum = kKeep ? float_from_bits(s) + value : value;
          return uint32_t((kNoisy ? to_bfloat16(sum, bits) : to_bfloat16(sum)).bits);
        };
        out[w] = folded(old[p][w] << 16, g[p][w] << 16, uint32_t(noise)) |
                 folded(old[p][w] & 0xffff0000u, g[p][w] & 0xffff0000u, uint32_t(noise >> 32)) << 16;
      }
      store_words(sum + i, out);
      const uint32_t mine[] = {is_second ? out[2] : out[0], is_second ? out[3] : out[1]};
      const uint32_t given[] = {is_second ? out[0] : out[2], is_second ? out[1] : out[3]};
#pragma unroll
      for (int w = 0; w < kQuad / 2; ++w) {
        const uint32_t taken = __shfl_xor_sync(0xffffffffu, given[w], kHalf);
        const uint32_t rows[] = {is_second ? taken : mine[w], is_second ? mine[w] : taken};
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float low = float_from_bits(rows[r] << 16), high = float_from_bits(rows[r] & 0xffff0000u);
          lanes[2 * w] += low * low, lanes[2 * w + 1] += high * high;
        }
      }
    }
  };
  const int end = n / kPair * kPair;
  int i = (is_second ? int(kLanes) : 0) + warp * kWarp * kWidth + lane % kHalf * kEight;
#pragma unroll 1
  for (; i + kPair < end; i += 2 * kPair) fold(std::integral_constant<int, 2>(), i);
  if (i < end) fold(std::integral_constant<int, 1>(), i);
  return end;
}

// Where a thread's lanes begin, in fours, if it folds pairs of rows.
__device__ inline int place() {
  const int lane = int(threadIdx.x) % kWarp;
  return int(threadIdx.x) - lane + lane % (kWarp / 2) * 2 + lane / (kWarp / 2);
}

template <bool kKeep, class G>
__device__ void fold_rounded(Bfloat16* sum, const G* grad, int n, bool aligned, float factor, const Rounding& round,
                             float (&lanes)[kWidth]) {
  int done = 0;
  if constexpr (std::is_same_v<G, Bfloat16>) {
    done = round.is_noisy ? fold_pairs<kKeep, true>(sum, grad, n, factor, round, lanes)
                          : fold_pairs<kKeep, false>(sum, grad, n, factor, round, lanes);
  }
  const Rounding rest = {round.is_noisy, round.is_odd, round.begin + uint32_t(done / 2) * Noise::kStride};
  fold_chunk<kKeep, true>(sum + done, grad + done, n - done, aligned, factor, rest, place() * kWidth, lanes);
}

template <bool kKeep, class G>
__device__ void fold_rounded(float* sum, const G* grad, int n, bool aligned, float factor, Exact exact,
                             float (&lanes)[kWidth]) {
  fold_chunk<kKeep, true>(sum, grad, n, aligned, factor, exact, int(threadIdx.x) * kWidth, lanes);
}

template <class S, class Rounding>
__device__ void fold_piece(S* sum, const Piece& at, const Fold& fold, bool keeps, float factor, const Rounding& round,
                           float* partial) {
  const int n = at.n, first = (std::is_same_v<S, float> ? int(threadIdx.x) : place()) * kWidth;
  if (fold.copies) {
    with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
      for_each_row<Policy::kFoldRows>(n, aligned && is_aligned(sum, sizeof(S)), [&](auto access, int i) {
        float g[access.kCount][kWidth];
        access.load(grad, i, n, g);
        access.store(sum, i, n, g);
      });
    });
    return;
  }
  float lanes[kWidth] = {};
  if (at.in.grad == nullptr || factor == 0.0f) {
    if (keeps) fold_chunk<true, false>(sum, sum, n, true, factor, Exact(), first, lanes);
    else fold_chunk<false, false>(sum, sum, n, true, factor, Exact(), first, lanes);
  } else {
    with_grad(at.in, at.offset, [&](const auto* grad, bool aligned) {
      if (keeps) fold_rounded<true>(sum, grad, n, aligned, factor, round, lanes);
      else fold_rounded<false>(sum, grad, n, aligned, factor, round, lanes);
    });
  }
  store_sum(lanes, partial, first / kWidth);
}

// kRounds: some sums are in bf16.
template <int kBytes, bool kRounds>
__global__ void __launch_bounds__(Policy::kThreads, kRounds ? Policy::kRoundingBlocks : Policy::kFoldBlocks)
    accumulate_kernel(const Work work, const __grid_constant__ Packet<kBytes> packet,
                      const __grid_constant__ Fold fold) {
  packet.deliver(work);
  const bool is_fresh = fold.is_fresh(), keeps = !fold.overwrites && !is_fresh;
  const float factor = is_fresh && !fold.overwrites ? 1.0f : fold.multiplier();
  for (int piece = int(blockIdx.x); piece < work.pieces; piece += int(gridDim.x)) {
    const Piece at = piece_of(work, piece, [&](int i) { return packet.word(work, work.count + i); });
    const Word word = packet.word(work, int(at.index));
    const uintptr_t sum = address_in(word);
    if (sum == 0 || (at.in.grad == nullptr && !is_fresh)) continue;
    float* const partial = fold.partials + piece;
    if (!kRounds || dtype_in(word) == Dtype::kFloat32) {
      fold_piece(global(reinterpret_cast<float*>(sum) + at.offset), at, fold, keeps, factor, Exact(), partial);
      continue;
    }
    if constexpr (kRounds) {
      Bfloat16* const to = global(reinterpret_cast<Bfloat16*>(sum) + at.offset);
      const bool is_noisy = !fold.copies && fold.words != nullptr && Fold::rounds(at.in, keeps, factor);
      const uint64_t noise_word = is_noisy ? fold.words[piece] : 0;
      const Noise noise(fold_key(noise_word, fold.salt), at.row.origin + at.offset);
      fold_piece(to, at, fold, keeps, factor, Rounding{is_noisy, is_noisy && noise.odd != 0, noise.first}, partial);
      // Behind the barriers of the sum of squares: all threads have read it.
      if (is_noisy && threadIdx.x == 0) fold.words[piece] = noise_word + 1;
    }
  }
}

}  // namespace accumfused::AF_TARGET
