// The three verbs on a GPU, from the host's side. Includes no CUDA header.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "../rows.h"

namespace accumfused::cuda {

// A norm's operands; addresses are of the device's memory. `reads`: the table's gradients are read; otherwise their
// sums of squares are all in `partials`.
struct Norm {
  bool reads;
  uintptr_t partials;
  double normalization;
  uintptr_t device_normalization, found_inf;
  bool takes_norm;
  std::optional<double> max_grad_norm;
  bool skips_nonfinite;
  uintptr_t outcome, skips;
};

// A table's copy on a device, and the verbs that work on it. Every launch brings the changes since the last one with
// it, so nothing waits and no staging memory is shared. A copy that is made while a graph is captured belongs to that
// graph, since its replays write it. One stream at a time.
//
// `stream` is a cudaStream_t of the device, addresses are of its memory. Verbs raise std::runtime_error with the
// kernel's name and CUDA's reason; the next call sends the whole table again.
class DeviceTable {
 public:
  // The size of `memory`, which is aligned to 16 bytes; hypers are padded to `stride` for each group.
  static int64_t bytes(const Rows& table, int64_t groups, int64_t stride);

  DeviceTable(int device, uintptr_t memory, int64_t groups, int64_t stride);

  void accumulate(const Rows& table, uintptr_t stream, const Fold& fold);
  void norm(const Rows& table, uintptr_t stream, const Norm& norm);
  void segment_norms(uintptr_t stream, uintptr_t partials, uintptr_t bounds, int64_t segments, uintptr_t squares);
  void step(const Rows& table, uintptr_t stream, const std::vector<HyperParameter>& hypers,
            const std::vector<int32_t>& rules, uintptr_t outcome, uintptr_t coefficients);

 private:
  struct Layout;
  Layout send(const Rows& table, uintptr_t stream, bool folds);

  int device_;
  uintptr_t memory_;
  int64_t groups_, stride_;
  std::vector<HyperParameter> hypers_;
  std::vector<int32_t> rules_;
  int units_ = -1, unit_ = 0;                         // of the rows on the device; -1: they are not there yet
  std::vector<unsigned char> operands_[2], numbers_;  // of steps and of folds; empty: not known
  bool has_counts_ = false;                           // a norm has copied them since the last step
};

// Why the kernels cannot run on a device, or "". Loads them, so that no capture has to.
std::string why_not(int device);

// What launches may do, to compare; all of it at first. queue: have more thread blocks than there is room for.
void allow(bool queue);

// An id that no other capture has; 0 where the stream is not being captured.
uint64_t capture_id(int device, uintptr_t stream);

}  // namespace accumfused::cuda
