// How the kernels cut their work. The numbers decide about speed; the bits are the same for all.
#pragma once
#include "../rows.h"

namespace accumfused::AF_TARGET {

constexpr int kWarp = 32;
constexpr int kWidth = 4;           // neighbouring elements of a thread: an access of 16 bytes, if they have four each
constexpr int kEight = 2 * kWidth;  // the same in loops for packed formats

struct Policy {
  static constexpr int kThreads = int(kLanes) / kWidth;  // of a thread block: each owns four lanes of the norm

  // Thread blocks that a multiprocessor has room for: the compiler limits registers to that. 7.5 has no room for more.
  // Of steps with more states fewer suffice, because each thread has more bytes in flight.
  static constexpr int kNormBlocks = 4;
  template <int kStates>
  static constexpr int kStepBlocks = kStates > 2 ? 3 : 4;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  static constexpr int kFoldBlocks = 4;
#else
  static constexpr int kFoldBlocks = 5;
#endif
  // Of folds with sums in bf16: the compiler for 10.0 would keep registers in local memory with 4.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr int kRoundingBlocks = 3;
#else
  static constexpr int kRoundingBlocks = 4;
#endif

  // Rows of 1024 elements that a thread block asks for before it computes. A step with more states has enough in flight
  // with one row. A norm's chunk is 32 rows, one after another by the order of its sum: in a small model 8 at once wait
  // for memory half as often as 4, and of a large one fewer thread blocks have more in flight.
  static constexpr int kNormRows = 8, kFoldRows = 2;
  template <int kStates>
  static constexpr int kStepRows = kStates < 2 ? 2 : 1;

  // A pass by units has this many for each multiprocessor, as far as units of the least size go; those of
  // the step in formats are whole rows of 2048 elements.
  static constexpr int kUnitsPerMultiprocessor = 16, kLeastUnit = 2048;

  // Whether loops for 8-bit states ask for their next row, on its way into the L2 cache. Off until a card has timed it:
  // such a row may wait for memory twice, for its states and then for its parameters.
#if defined(ACCUMFUSED_PREFETCH_AHEAD)
  static constexpr bool kPrefetchesAhead = true;
#else
  static constexpr bool kPrefetchesAhead = false;
#endif

  // Hyper-parameters that a step's launch carries; for those of more groups there are more launches.
  static constexpr int kCarriedHypers = 150;

  // Bytes of words that a launch carries: few, or as many as go into the 32764 bytes of arguments that a GPU takes.
  static constexpr int kSmallPacket = 3584, kLargePacket = 32000;
};

}  // namespace accumfused::AF_TARGET
