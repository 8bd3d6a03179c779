// How a norm ends: the chunks' sums of squares become one number, and that number the coefficient of the step.
#pragma once
#include <optional>

#include "numeric.h"
#include "rows.h"

namespace accumfused::AF_TARGET {

// fp64, strided over 1024 lanes, then the same halving tree as inside a chunk: one order for every backend.
inline double sum_partials(const float* partials, int64_t chunks) {
  double lanes[kLanes];
  int64_t width = 1;
  while (width < chunks && width < kLanes) width *= 2;
  for (int64_t l = 0; l < width; ++l) lanes[l] = 0.0;
  for (int64_t c = 0; c < chunks; ++c) lanes[c % kLanes] += double(partials[c]);
  while (width > 1) {
    width /= 2;
    for (int64_t l = 0; l < width; ++l) lanes[l] += lanes[l + width];
  }
  return lanes[0];
}

// Squares of gradients below 2^-63 lose bits, and below 2^-75 they are 0. A small divisor could
// make a large norm of them all the same: the norm is not known then, and becomes NaN.
constexpr double kLeastSum = 0x1p-100, kLeastDivisor = 0x1p-50;

struct Scaling {
  double normalization;                // the gradients' divisor
  const double* device_normalization;  // nullable; multiplies it
  const float* found_inf;              // nullable; not 0: the step is skipped
  bool takes_norm;
  bool clips;
  double max_grad_norm;
  bool skips_nonfinite;
};

inline Scaling make_scaling(double normalization, uintptr_t device_normalization, uintptr_t found_inf, bool takes_norm,
                            std::optional<double> max_grad_norm, bool skips_nonfinite) {
  return {normalization,
          pointer<const double>(device_normalization),
          pointer<const float>(found_inf),
          takes_norm,
          max_grad_norm.has_value(),
          max_grad_norm.value_or(0.0),
          skips_nonfinite};
}

// outcome = {coefficient, norm, skipped}, with
//   norm = sqrt(sum of squares) / normalization
//   coefficient = min(1, max_grad_norm / (norm + 1e-6)) / normalization     (torch.nn.utils.clip_grad_norm_'s formula)
// A NaN stays a NaN in both. The root is taken of an fp32 number, which every backend rounds correctly.
AF_INLINE void finish_norm(const Scaling& scaling, double sum_of_squares, float* outcome, int64_t* skips) {
  const double divisor =
      scaling.device_normalization ? scaling.normalization * *scaling.device_normalization : scaling.normalization;
  const double inverse = divisor > 0 && is_finite(divisor) ? 1.0 / divisor : double(float_from_bits(kNan));
  const bool is_lost = sum_of_squares < kLeastSum && divisor < kLeastDivisor;
  const double root = is_lost ? double(float_from_bits(kNan)) : double(square_root(float(sum_of_squares)));
  const double norm = scaling.takes_norm ? root * inverse : 0.0;
  double clip = 1.0;
  if (scaling.clips) {
    clip = scaling.max_grad_norm / (double(float(norm)) + 1e-6);
    clip = clip > 1.0 ? 1.0 : clip;  // keeps a NaN
  }
  outcome[0] = float(inverse * clip);
  outcome[1] = float(norm);
  const bool finite = is_finite(outcome[0]) && is_finite(outcome[1]);
  const bool skipped = (scaling.skips_nonfinite && !finite) || (scaling.found_inf && *scaling.found_inf != 0.0f);
  outcome[2] = skipped ? 1.0f : 0.0f;
  if (skips != nullptr && skipped) *skips += 1;
}

}  // namespace accumfused::AF_TARGET
