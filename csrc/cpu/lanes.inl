// Sums over a chunk in the norm's order: lane l sums elements l, l + 1024, ... in sequence, a halving tree the lanes.
namespace accumfused::AF_TARGET {
namespace {

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

constexpr int64_t kNarrow = 16;  // lanes are handled by so many: loops of known length need no scalar rest

// Missing lanes are zeros, and none is -0: more or fewer of them change no bit of the sum.
int64_t tree_width(int64_t n) {
  int64_t width = kNarrow;
  while (width < n && width < kLanes) width *= 2;
  return width;
}

template <int64_t kWidth>
AF_INLINE float narrow_tree_sum(float* lanes) {
  if constexpr (kWidth > 1) {
    for (int64_t l = 0; l < kWidth / 2; ++l) lanes[l] += lanes[l + kWidth / 2];
    return narrow_tree_sum<kWidth / 2>(lanes);
  }
  return lanes[0];
}

AF_INLINE float tree_sum(float* __restrict lanes, int64_t width) {
  while (width > kNarrow) {
    width /= 2;
    for (int64_t l = 0; l < width; l += kNarrow) {
      for (int64_t k = 0; k < kNarrow; ++k) lanes[l + k] += lanes[l + k + width];
    }
  }
  return narrow_tree_sum<kNarrow>(lanes);
}

}  // namespace
}  // namespace accumfused::AF_TARGET
