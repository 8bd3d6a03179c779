// The CPU kernels, compiled once per instruction set into AF_TARGET's namespace. Nothing here names an instruction set:
// the compiler vectorises the loops, and all compute the same bits.
#include "float_mode.h"
#include "rule.inl"
#include "stream.h"

namespace accumfused::AF_TARGET {
namespace {

using cpu::Work;

// ---- work: chunks of all tensors, found by search in the rows' prefix sums ------------------------------------------

struct Nothing {};

// The row that a chunk belongs to: the last one whose first chunk is not behind it. Rows without elements have none.
AF_INLINE int64_t row_of(const Work& work, int64_t chunk) {
  int64_t low = 0, high = work.count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (work.rows[middle].first_chunk <= chunk ? low : high) = middle;
  }
  return low;
}

// Calls body(local, row, operands, chunk, offset, n) for every chunk; each thread has a `Local` of its own.
template <class Local, class Body>
void for_each_chunk(const Work& work, const Body& body) {
  const auto walk = [&](Local& local, int64_t chunk, int64_t end) {
    for (int64_t i = row_of(work, chunk); chunk < end; ++i) {
      const Row& row = work.rows[i];
      const int64_t behind = smaller(row.first_chunk + chunk_count(row.numel), end);
      for (; chunk < behind; ++chunk) {
        const int64_t offset = (chunk - row.first_chunk) * kChunk;
        body(local, row, work.operands[i], chunk, offset, smaller(kChunk, row.numel - offset));
      }
    }
  };
  if (work.threads == 1) {
    FloatMode ieee;
    Local local;
    walk(local, 0, work.chunks);
    return;
  }
  // Runs of chunks, so that the search is paid once a run; 64 runs a thread keep the threads even.
  const int64_t run = work.chunks / (64 * int64_t(work.threads)) + 1;
  const int64_t runs = (work.chunks + run - 1) / run;
#pragma omp parallel num_threads(work.threads) if (work.chunks > 1)
  {
    FloatMode ieee;
    Local local;
#pragma omp for schedule(dynamic)
    for (int64_t r = 0; r < runs; ++r) walk(local, r * run, smaller((r + 1) * run, work.chunks));
  }
}

// ---- norm -----------------------------------------------------------------------------------------------------------

template <class G>
float sum_of_squares(const G* __restrict grad, int64_t n) {
  alignas(64) float lanes[kLanes];
  const int64_t width = tree_width(n);
  const int64_t first = smaller(n, kLanes);
  int64_t whole = 0;
  for (; whole + kNarrow <= first; whole += kNarrow) {
    for (int64_t k = 0; k < kNarrow; ++k) {
      const float g = to_float(grad[whole + k]);
      lanes[whole + k] = g * g;
    }
  }
  for (int64_t l = whole; l < width; l += kNarrow) {
    for (int64_t k = 0; k < kNarrow; ++k) lanes[l + k] = 0.0f;
  }
  for (int64_t l = whole; l < first; ++l) {
    const float g = to_float(grad[l]);
    lanes[l] = g * g;
  }
  int64_t i = kLanes;
  // Row by row, as they lie in memory, with the lines 8 kB ahead: the hardware prefetcher alone leaves a third of its
  // rate unused, and several rows at a time (fewer accesses to the lanes) half.
  constexpr int64_t kLine = 64 / sizeof(G), kAhead = 8192 / sizeof(G);
  for (; i + kLanes <= n; i += kLanes) {
    for (int64_t l = 0; l < kLanes; l += kLine) {
      const G* __restrict line = grad + i + l;
      float* __restrict lane = lanes + l;
      __builtin_prefetch(line + kAhead, 0, 2);
      for (int64_t k = 0; k < kLine; ++k) {
        const float g = to_float(line[k]);
        lane[k] += g * g;
      }
    }
  }
  for (; i < n; i += kLanes) {
    const int64_t length = smaller(kLanes, n - i);
    for (int64_t l = 0; l < length; ++l) {
      const float g = to_float(grad[i + l]);
      lanes[l] += g * g;
    }
  }
  return tree_sum(lanes, width);
}

// Small tensors lie anywhere, and the hardware prefetchers do not find them: 1000 of 64 elements out of the caches take
// 92 us in place of 128. (The step, which computes more than it reads, gains nothing.)
void fetch_ahead(const Work& work, const Operands& now) {
  constexpr int64_t kRows = 4, kLines = 16;
  const int64_t i = &now - work.operands + kRows;
  if (i >= work.count) return;
  const char* const grad = static_cast<const char*>(work.operands[i].grad);
  const int64_t lines = smaller(work.rows[i].numel / 16 + 1, kLines);
  for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(grad + line * 64);
}

void norm(const Work& work, float* partials) {
  for_each_chunk<Nothing>(work, [&](Nothing, const Row&, const Operands& in, int64_t chunk, int64_t offset, int64_t n) {
    if (offset == 0) fetch_ahead(work, in);
    if (in.grad == nullptr) return;
    partials[chunk] = with_grad(in, offset, [=](auto grad) { return sum_of_squares(grad, n); });
  });
}

// ---- accumulate -----------------------------------------------------------------------------------------------------

// sum <- (sum if kKeep) + (factor * grad if kAdd). One row of 1024 at a time, so that squares are summed while the
// result is in registers. Where a sum is not kept it may be the gradient itself, scaled in place.
template <bool kKeep, bool kAdd, class G>
float fold_chunk(float* sum, const G* grad, float factor, int64_t n) {
  alignas(64) float lanes[kLanes];
  const int64_t width = tree_width(n);
  for (int64_t l = 0; l < width; ++l) lanes[l] = 0.0f;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t length = smaller(kLanes, n - i);
    float* const out = sum + i;
    const G* const in = kAdd ? grad + i : nullptr;
#pragma GCC ivdep  // if the one is the other, element k is element k
    for (int64_t l = 0; l < length; ++l) {
      float value = kKeep ? out[l] : 0.0f;
      if constexpr (kAdd) value = kKeep ? value + to_float(in[l]) * factor : to_float(in[l]) * factor;
      out[l] = value;
      lanes[l] += value * value;
    }
  }
  return tree_sum(lanes, width);
}

// The same for a sum in bf16, whose results are rounded by noise, or to nearest without any.
template <bool kKeep, bool kAdd, class G>
float fold_chunk(Bfloat16* sum, const G* grad, float factor, int64_t n, Draw* noise) {
  alignas(64) float lanes[kLanes];
  alignas(64) uint32_t tile[kLanes + 64];
  const int64_t width = tree_width(n);
  for (int64_t l = 0; l < width; ++l) lanes[l] = 0.0f;
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t length = smaller(kLanes, n - i);
    Bfloat16* const out = sum + i;
    const G* const in = kAdd ? grad + i : nullptr;
    const auto fold = [&](const auto& rounded) {
#pragma GCC ivdep
      for (int64_t l = 0; l < length; ++l) {
        float value = kKeep ? to_float(out[l]) : 0.0f;
        if constexpr (kAdd) value = kKeep ? value + to_float(in[l]) * factor : to_float(in[l]) * factor;
        out[l] = rounded(value, l);
        value = to_float(out[l]);
        lanes[l] += value * value;
      }
    };
    if (noise == nullptr) {
      fold([](float value, int64_t) { return to_bfloat16(value); });
    } else {
      const uint32_t* const bits = noise->next(length, tile);
      fold([&](float value, int64_t l) { return to_bfloat16(value, bits[l]); });
    }
  }
  return tree_sum(lanes, width);
}

template <bool kKeep, bool kAdd, class G>
float fold_chunk(float* sum, const G* grad, float factor, int64_t n, Draw*) {
  return fold_chunk<kKeep, kAdd>(sum, grad, factor, n);
}

void accumulate(const Work& work, const Fold& fold) {
  const bool is_fresh = fold.is_fresh(), copies = fold.copies, keeps = !fold.overwrites && !is_fresh;
  const float factor = is_fresh && !fold.overwrites ? 1.0f : fold.multiplier();
  int64_t written_bytes = 0;
  for (int64_t i = 0; copies && i < work.count; ++i) written_bytes += work.operands[i].sum ? work.rows[i].numel * 4 : 0;
  const bool beyond_cache = written_bytes > kStreamBytes;
  const auto fold_into = [&](auto* sum, const Operands& in, int64_t chunk, int64_t offset, int64_t n, Draw* noise) {
    float* const partial = fold.partials + chunk;
    const float* const nothing = nullptr;
    if (in.grad == nullptr) {
      if (is_fresh) *partial = fold_chunk<false, false>(sum, nothing, factor, n, noise);
    } else if (copies) {
      with_grad(in, offset, [=](auto grad) { overwrite(sum, grad, n, beyond_cache); });
    } else if (factor == 0.0f) {
      *partial = keeps ? sum_of_squares(sum, n) : fold_chunk<false, false>(sum, nothing, factor, n, noise);
    } else {
      with_grad(in, offset, [=](auto grad) {
        *partial = keeps ? fold_chunk<true, true>(sum, grad, factor, n, noise)
                         : fold_chunk<false, true>(sum, grad, factor, n, noise);
      });
    }
  };
  for_each_chunk<Nothing>(work,
                          [&](Nothing, const Row& row, const Operands& in, int64_t chunk, int64_t offset, int64_t n) {
                            if (in.sum == nullptr) return;
                            if (in.sum_dtype == Dtype::kFloat32)
                              return fold_into(static_cast<float*>(in.sum) + offset, in, chunk, offset, n, nullptr);
                            Bfloat16* const sum = static_cast<Bfloat16*>(in.sum) + offset;
                            if (fold.words == nullptr || !fold.rounds(in, keeps, factor))
                              return fold_into(sum, in, chunk, offset, n, nullptr);
                            Draw noise(Noise(fold_key(fold.words[chunk]++, fold.salt), row.origin + offset));
                            fold_into(sum, in, chunk, offset, n, &noise);
                          });
}

// ---- step -----------------------------------------------------------------------------------------------------------

#define AF_CODE(Rule) kRuleCode<Rule>,
constexpr RuleCode kRules[] = {AF_RULES(AF_CODE)};
#undef AF_CODE

void step(const Work& work, const Step& step) {
  if (step.outcome[2] != 0.0f) return;  // skipped: nothing is written
  for_each_chunk<Prepared>(
      work, [&](Prepared& prepared, const Row& row, const Operands& in, int64_t, int64_t offset, int64_t n) {
        const int64_t index = work.first_row + (&row - work.rows);
        if (in.grad) (*step.rules[row.group])(row, index, in, step, prepared, offset, n);
      });
  for (int64_t i = 0; i < work.count; ++i) {
    if (work.operands[i].grad && work.rows[i].step) *work.rows[i].step += 1.0f;
  }
}

}  // namespace
}  // namespace accumfused::AF_TARGET
