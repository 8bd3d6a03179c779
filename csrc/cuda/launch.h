// The three verbs on a GPU, from the host's side. Includes no CUDA header.
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../rows.h"

namespace accumfused::gpu {
struct Work;
}

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

// A cudaStream_t, and whether a graph captures it.
using Stream = std::pair<uintptr_t, bool>;

// Gives memory for so many bytes, which only replays of graphs will read, and a stream that is not captured to write
// it.
using Allocate = std::function<std::pair<uintptr_t, uintptr_t>(size_t bytes)>;

// A table's copy on a device, and the verbs that work on it, on one stream at a time. Rows are sent once, by the
// constructor, which no graph may capture. Operands are words (see work.cuh): those that have changed since the last
// call travel with its launch, or in front if they are too many. Nothing waits, but in a capture: its words are written
// once, outside of the graph, and never again. Addresses are of the device's memory. Verbs raise std::runtime_error
// with the kernel's name and CUDA's reason; the next call sends the words again.
class DeviceTable {
 public:
  static int64_t bytes(const Rows& table);  // the size of `memory`, which is aligned to 16 bytes
  DeviceTable(int device, uintptr_t memory, const Rows& table, uintptr_t stream, Allocate allocate);

  void accumulate(const Rows& table, Stream stream, const Fold& fold);
  void norm(const Rows& table, Stream stream, const Norm& norm);
  void segment_norms(uintptr_t stream, uintptr_t partials, uintptr_t bounds, int64_t segments, uintptr_t squares);
  // hypers: of each group as many.
  void step(const Rows& table, Stream stream, const std::vector<HyperParameter>& hypers,
            const std::vector<int32_t>& rules, uintptr_t outcome, uintptr_t coefficients);

 private:
  using Words = std::vector<uint64_t>;
  struct Part {
    uintptr_t at;
    Words sent;
  };
  gpu::Work work(bool by_units, int64_t chunks, uint64_t* words) const;
  template <class Launch>
  void with_words(Part& part, const Words& words, Stream stream, const Launch& launch);
  template <class Launch>
  void with_grads(const Rows& table, Stream stream, const Launch& launch);

  int device_;
  uintptr_t memory_;
  std::vector<Row> rows_;
  int units_, unit_;                     // how many the rows have, and elements of one
  Part grads_, folds_;                   // of eager calls
  std::map<Words, uintptr_t> captured_;  // where those of captured ones are
  Allocate allocate_;
  std::optional<bool> counted_;  // a norm has copied step counts since the last step: in a capture, or eagerly
};

// Why the kernels cannot run on a device, or "". Loads them, so that no capture has to.
std::string why_not(int device);

// What launches may do, to compare; all of it at first. queue: have more thread blocks than there is room for.
void allow(bool queue);

}  // namespace accumfused::cuda
