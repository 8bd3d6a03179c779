#define AF_TARGET gpu
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "accumulate.cuh"
#include "launch.h"
#include "norm.cuh"
#include "packet.cuh"
#include "step.cuh"

namespace accumfused::cuda {
namespace {

using gpu::Kind;
using gpu::Packet;
using gpu::Policy;
using gpu::Word;

using StepKernel = void (*)(gpu::Work, gpu::Hypers, const float*, const float*);

// In kernels for any format, the rules that people keep in 16 and 8 bits have loops of their own.
template <class Rule>
constexpr bool kHasLoops = std::is_same_v<Rule, gpu::AdamFunctor> || std::is_same_v<Rule, gpu::LionFunctor>;
template <class Rule>
using InAnyFormat = std::conditional_t<kHasLoops<Rule>, gpu::PackedRule<Rule>, Rule>;

// Of each rule: the kernel for rows in fp32, and the one for rows in any format.
#define AF_KERNELS(Rule) \
  {gpu::step_kernel<Kind::kPlain, gpu::Rule>, gpu::step_kernel<Kind::kAny, InAnyFormat<gpu::Rule>>},
constexpr StepKernel kStep[][2] = {AF_CUDA_RULES(AF_KERNELS)};
#undef AF_KERNELS

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // or the next call would report it again
  std::string reason = std::string("CUDA, ") + what + ": " + cudaGetErrorString(status);
  if (status == cudaErrorInitializationError) {
    reason += " (a forked process cannot use CUDA after its parent did; start it with the spawn method)";
  }
  throw std::runtime_error(reason);
}

class Device {
 public:
  explicit Device(int device) {
    check(cudaGetDevice(&before_), "current device");
    changed_ = device != before_;
    if (changed_) check(cudaSetDevice(device), "setting the device");  // makes a context there, if there is none
  }
  ~Device() {
    if (changed_) cudaSetDevice(before_);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Of the current device.
int multiprocessors() {
  int device = 0, count = 0;
  check(cudaGetDevice(&device), "current device");
  check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "multiprocessors");
  return count;
}

// Cuts the rows into units: chunks, or even parts of those if that makes too few. How many, and of what size.
std::pair<int, int> cut(std::vector<Row>& rows) {
  const int64_t enough = int64_t(Policy::kUnitsPerMultiprocessor) * multiprocessors();
  for (int unit = int(kChunk);; unit /= 2) {
    int64_t units = 0;
    for (Row& row : rows) row.first_unit = int32_t(units), units += (row.numel + unit - 1) / unit;
    if (units >= enough || unit == Policy::kLeastUnit) return {int(units), unit};
  }
}

std::atomic<bool> may_queue{true};

// So many thread blocks of a kernel run at once on this device.
template <class... Parameters>
int room_for(void (*kernel)(Parameters...)) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  int device = 0, blocks = 0;
  check(cudaGetDevice(&device), "current device");
  int& found = known[{device, reinterpret_cast<const void*>(kernel)}];
  if (found == 0) {
    check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, Policy::kThreads, 0), "occupancy");
    found = std::max(1, multiprocessors() * blocks);
  }
  return found;
}

// Thread blocks. `queue`: also more than there is room for; the device hands out the next one when another ends.
struct Blocks {
  int64_t count;
  bool queue = false;
};

// So many that each thread has one.
Blocks blocks_for(int64_t count) { return {(count + Policy::kThreads - 1) / Policy::kThreads}; }

// One for each piece. In a queue each has its beginning to pay for, which is little beside a whole chunk.
Blocks blocks_of(const gpu::Work& work) { return {work.pieces, may_queue && work.size == int(kChunk)}; }

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), Blocks blocks, uintptr_t stream,
            const Arguments&... arguments) {
  const int64_t most = blocks.queue ? INT32_MAX / Policy::kThreads : room_for(kernel);  // kernels count threads in ints
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(unsigned(std::clamp<int64_t>(blocks.count, 1, most)));
  config.blockDim = dim3(Policy::kThreads);
  config.stream = reinterpret_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// Calls launch(packet) with words [begin, end), in the smaller packet if they fit.
template <class Launch>
void with_packet(const std::vector<Word>& words, size_t begin, size_t end, const Launch& launch) {
  const auto fill = [&](auto packet) {
    packet.begin = int(begin), packet.end = int(end);
    std::copy_n(words.data() + begin, end - begin, packet.words);
    launch(packet);
  };
  if ((end - begin) * sizeof(Word) <= Policy::kSmallPacket) fill(Packet<Policy::kSmallPacket>());
  else fill(Packet<Policy::kLargePacket>());
}

template <class P>
constexpr int kBytes = std::decay_t<P>::kBytes;

template <int kBytes>
void write(const gpu::Work& work, const Packet<kBytes>& packet, uintptr_t stream) {
  const Blocks blocks = blocks_for(std::max(packet.end - packet.begin, work.count));
  launch("table", gpu::write_kernel<kBytes>, blocks, stream, work, packet);
}

constexpr Word kUnknown = ~Word(0);                                 // no call has it
constexpr size_t kMostWords = Policy::kLargePacket / sizeof(Word);  // that a launch carries

// In front of the launches that read them; as many launches as it takes.
void write_all(const std::vector<Word>& words, size_t begin, size_t end, uintptr_t to, uintptr_t stream) {
  gpu::Work work = {};
  work.words = pointer<Word>(to);
  for (; begin < end; begin += kMostWords) {
    with_packet(words, begin, std::min(end, begin + kMostWords), [&](auto& packet) { write(work, packet, stream); });
  }
}

// What a capture forbids its thread: to allocate, to wait.
class Unrestricted {
 public:
  Unrestricted() { check(cudaThreadExchangeStreamCaptureMode(&mode_), "capture mode"); }
  ~Unrestricted() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  Unrestricted(const Unrestricted&) = delete;
  Unrestricted& operator=(const Unrestricted&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Where the words are: outside of the graph that is being captured, written on another stream, for which the host
// waits.
uintptr_t written_now(const std::vector<Word>& words, const Allocate& allocate) {
  const Unrestricted here;
  const size_t bytes = words.size() * sizeof(Word);
  const auto [memory, stream] = allocate(bytes);
  const auto apart = reinterpret_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(pointer<void>(memory), words.data(), bytes, cudaMemcpyHostToDevice, apart), "table of a graph");
  check(cudaStreamSynchronize(apart), "table of a graph");
  return memory;
}

size_t rounded(size_t bytes) { return (bytes + sizeof(uint4) - 1) / sizeof(uint4) * sizeof(uint4); }

}  // namespace

int64_t DeviceTable::bytes(const Rows& table) {
  return int64_t(rounded(size_t(table.count) * (sizeof(Row) + 3 * sizeof(Word) + sizeof(float))) + sizeof(uint4));
}

DeviceTable::DeviceTable(int device, uintptr_t memory, const Rows& table, uintptr_t stream, Allocate allocate)
    : device_(device), memory_(memory), rows_(table.rows, table.rows + table.count), allocate_(allocate) {
  const Device current(device);
  std::tie(units_, unit_) = cut(rows_);
  Words words(rows_.size() * sizeof(Row) / sizeof(Word));
  memcpy(words.data(), rows_.data(), words.size() * sizeof(Word));
  words.resize(words.size() + sizeof(uint4) / sizeof(Word));  // and the ticket, 0 between launches
  grads_ = {memory + words.size() * sizeof(Word), Words(rows_.size(), kUnknown)};
  folds_ = {grads_.at + rows_.size() * sizeof(Word), Words(2 * rows_.size(), kUnknown)};
  write_all(words, 0, words.size(), memory, stream);
}

gpu::Work DeviceTable::work(bool by_units, int64_t chunks, uint64_t* words) const {
  gpu::Work work = {};
  work.rows = pointer<const Row>(memory_), work.words = words, work.count = int(rows_.size());
  work.pieces = by_units ? units_ : int(chunks), work.size = by_units ? unit_ : int(kChunk);
  work.ticket = pointer<uint32_t>(memory_ + rows_.size() * sizeof(Row));
  work.counts = pointer<float>(folds_.at + folds_.sent.size() * sizeof(Word));
  return work;
}

// Calls launch(packet, address): when that has run, the words are at the address. A graph's are there before.
template <class Launch>
void DeviceTable::with_words(Part& part, const Words& words, Stream stream, const Launch& launch) {
  size_t begin = 0, end = words.size();
  if (stream.second) {
    uintptr_t& at = captured_[words];
    if (at == 0) at = written_now(words, allocate_);
    return with_packet(words, end, end, [&](auto& packet) { launch(packet, pointer<Word>(at)); });
  }
  Words& sent = part.sent;
  while (begin < end && words[begin] == sent[begin]) ++begin;
  while (begin < end && words[end - 1] == sent[end - 1]) --end;
  std::fill_n(sent.data() + begin, end - begin, kUnknown);  // if a launch fails
  const bool fits = end - begin <= kMostWords;
  if (!fits) write_all(words, begin, end, part.at, stream.first);
  with_packet(words, fits ? begin : end, end, [&](auto& packet) { launch(packet, pointer<Word>(part.at)); });
  std::copy_n(words.data() + begin, end - begin, sent.data() + begin);
}

// Of a norm or a step. A window's step finds its gradients where the last fold has its sums.
template <class Launch>
void DeviceTable::with_grads(const Rows& table, Stream stream, const Launch& launch) {
  Words words;
  for (int64_t i = 0; i < table.count; ++i) {
    words.push_back(gpu::word_of(table.operands[i].grad, table.operands[i].grad_dtype));
  }
  with_words(std::equal(words.begin(), words.end(), folds_.sent.begin()) ? folds_ : grads_, words, stream, launch);
}

void DeviceTable::accumulate(const Rows& table, Stream stream, const Fold& fold) {
  const Device device(device_);
  counted_.reset();
  Words words;
  bool rounds = false;
  for (int64_t i = 0; i < table.count; ++i) {
    const Operands& in = table.operands[i];
    words.push_back(gpu::word_of(in.sum, in.sum_dtype));
    rounds |= in.sum != nullptr && in.sum_dtype != Dtype::kFloat32;
  }
  for (int64_t i = 0; i < table.count; ++i) {
    words.push_back(gpu::word_of(table.operands[i].grad, table.operands[i].grad_dtype));
  }
  with_words(folds_, words, stream, [&](auto& packet, Word* at) {
    const gpu::Work work = this->work(fold.copies, table.chunks, at);
    constexpr int kSize = kBytes<decltype(packet)>;
    const auto kernel = rounds ? gpu::accumulate_kernel<kSize, true> : gpu::accumulate_kernel<kSize, false>;
    launch("accumulate", kernel, blocks_of(work), stream.first, work, packet, fold);
  });
}

void DeviceTable::norm(const Rows& table, Stream stream, const Norm& norm) {
  const Device device(device_);
  const gpu::Scaling scaling = gpu::make_scaling(norm.normalization, norm.device_normalization, norm.found_inf,
                                                 norm.takes_norm, norm.max_grad_norm, norm.skips_nonfinite);
  const Blocks blocks{std::max(norm.reads ? table.chunks : 1, blocks_for(table.count).count)};
  const auto measure = [&](auto& packet, Word* at) {
    launch("norm", gpu::norm_kernel<kBytes<decltype(packet)>>, blocks, stream.first, work(false, table.chunks, at),
           packet, norm.reads, pointer<float>(norm.partials), scaling, pointer<float>(norm.outcome),
           pointer<int64_t>(norm.skips));
  };
  if (norm.reads) with_grads(table, stream, measure);
  else with_packet({}, 0, 0, [&](auto& packet) { measure(packet, nullptr); });
  counted_ = stream.second;
}

void DeviceTable::segment_norms(uintptr_t stream, uintptr_t partials, uintptr_t bounds, int64_t segments,
                                uintptr_t squares) {
  const Device device(device_);
  launch("segment norms", gpu::segment_norms_kernel, {segments}, stream, pointer<const float>(partials),
         pointer<const int64_t>(bounds), segments, pointer<double>(squares));
}

void DeviceTable::step(const Rows& table, Stream stream, const std::vector<HyperParameter>& hypers,
                       const std::vector<int32_t>& rules, uintptr_t outcome, uintptr_t coefficients) {
  const Device device(device_);
  gpu::Work all;
  const bool are_counted = std::exchange(counted_, std::nullopt) == stream.second;
  with_grads(table, stream, [&](auto& packet, Word* at) {
    all = this->work(true, table.chunks, at);
    gpu::Work before = all;
    if (are_counted) before.count = 0;
    if (packet.begin < packet.end || !are_counted) write(before, packet, stream.first);
  });
  const size_t stride = hypers.size() / std::max<size_t>(1, rules.size());
  const size_t most = Policy::kCarriedHypers / std::max<size_t>(1, stride);
  const auto row_of = [&](size_t group) {
    return std::partition_point(rows_.begin(), rows_.end(), [&](const Row& row) { return row.group < int64_t(group); });
  };
  for (size_t group = 0, end; group < rules.size(); group = end) {  // nearly always one launch for all groups
    for (end = group + 1; end < rules.size() && rules[end] == rules[group] && end - group < most;) ++end;
    const auto begin_row = row_of(group), end_row = row_of(end);
    if (begin_row == end_row) continue;
    gpu::Work work = all;
    work.first_row = int(begin_row - rows_.begin()), work.count = int(end_row - begin_row);
    work.first_piece = begin_row->first_unit;
    work.pieces = (end_row == rows_.end() ? units_ : end_row->first_unit) - work.first_piece;
    gpu::Hypers numbers = {int(group), int(stride), {}};
    std::copy_n(hypers.data() + group * stride, (end - group) * stride, numbers.values);
    launch("step", kStep[rules[group]][!table.plain], blocks_of(work), stream.first, work, numbers,
           pointer<const float>(outcome), pointer<const float>(coefficients));
  }
}

std::string why_not(int device) {
  try {
    const Device current(device);
    const auto load = [](const char* name, auto* kernel) {
      cudaFuncAttributes attributes;
      check(cudaFuncGetAttributes(&attributes, kernel), name);
    };
    load("segment norms", gpu::segment_norms_kernel);
    const auto load_all = [&](auto packet) {
      load("accumulate", gpu::accumulate_kernel<kBytes<decltype(packet)>, false>);
      load("accumulate", gpu::accumulate_kernel<kBytes<decltype(packet)>, true>);
      load("norm", gpu::norm_kernel<kBytes<decltype(packet)>>);
      load("table", gpu::write_kernel<kBytes<decltype(packet)>>);
    };
    load_all(Packet<Policy::kSmallPacket>()), load_all(Packet<Policy::kLargePacket>());
    for (const auto& kernels : kStep) {
      for (const StepKernel kernel : kernels) load("step", kernel);
    }
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

void allow(bool queue) { may_queue = queue; }

}  // namespace accumfused::cuda
