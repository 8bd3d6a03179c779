#define AF_TARGET gpu
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
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

using StepKernel = void (*)(gpu::Work, gpu::Hypers, const float*, const float*, int);

// In kernels for any format, the rules that people keep in 16 and 8 bits have loops of their own.
template <class Rule>
struct InAnyFormat {
  using Form = Rule;
};
template <>
struct InAnyFormat<gpu::AdamFunctor> {
  using Form = gpu::PackedRule<gpu::AdamFunctor>;
};
template <>
struct InAnyFormat<gpu::LionFunctor> {
  using Form = gpu::PackedRule<gpu::LionFunctor>;
};

// Of each rule: the kernel for rows in fp32, and the one for rows in any format.
#define AF_KERNELS(Rule) \
  {gpu::step_kernel<Kind::kPlain, gpu::Rule>, gpu::step_kernel<Kind::kAny, InAnyFormat<gpu::Rule>::Form>},
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
int attribute(cudaDeviceAttr of, const char* name) {
  int device = 0, value = 0;
  check(cudaGetDevice(&device), "current device");
  check(cudaDeviceGetAttribute(&value, of, device), name);
  return value;
}

int multiprocessors() { return attribute(cudaDevAttrMultiProcessorCount, "multiprocessors"); }

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

template <int kBytes>
void send_packet(const unsigned char* from, size_t size, uintptr_t to, uintptr_t stream) {
  Packet<kBytes> packet;
  memcpy(packet.bytes, from, size);
  const int count = int(size / sizeof(uint4));
  launch("table", gpu::write_kernel<kBytes>, blocks_for(count), stream, packet, reinterpret_cast<uint4*>(to), count);
}

// As many launches as it takes.
void send_bytes(const unsigned char* from, size_t size, uintptr_t to, uintptr_t stream) {
  while (size > 0) {
    const size_t part = std::min(size, size_t(Policy::kLargePacket));
    (part <= Policy::kSmallPacket ? send_packet<Policy::kSmallPacket> : send_packet<Policy::kLargePacket>)(from, part,
                                                                                                           to, stream);
    from += part, to += part, size -= part;
  }
}

// Sends the bytes from the first difference to the last. `sent` holds the bytes that were sent last; it is empty where
// they are not known, so after a failed launch too.
void send_changes(std::vector<unsigned char>& sent, const void* now, size_t size, uintptr_t to, uintptr_t stream) {
  const auto* const bytes = static_cast<const unsigned char*>(now);
  size_t begin = 0, end = size;
  if (!sent.empty()) {
    constexpr size_t kGrain = 256;  // bytes
    const auto is_same = [&](size_t from, size_t to) { return memcmp(bytes + from, &sent[from], to - from) == 0; };
    while (begin < end && is_same(begin, std::min(begin + kGrain, end))) begin = std::min(begin + kGrain, end);
    while (end > begin && is_same(std::max(begin, (end - 1) / kGrain * kGrain), end)) {
      end = std::max(begin, (end - 1) / kGrain * kGrain);
    }
  }
  if (begin == end) return;
  std::vector<unsigned char> known;
  known.swap(sent);
  send_bytes(bytes + begin, end - begin, to + begin, stream);
  known.resize(size);
  memcpy(known.data() + begin, bytes + begin, end - begin);
  sent.swap(known);
}

size_t rounded(size_t bytes) { return (bytes + sizeof(uint4) - 1) / sizeof(uint4) * sizeof(uint4); }

}  // namespace

// The places of the tables in memory; each begins at a multiple of 16 bytes. Folds have operands of their own: in a
// loop whose tensors keep their addresses, neither they nor the step's change.
struct DeviceTable::Layout {
  size_t rows, operands, hypers, rules, ticket, counts, end;
  gpu::Work chunks, units;
  gpu::Hypers step;

  Layout(const Rows& table, uintptr_t memory, int64_t groups, int64_t stride, bool folds)
      : rows(0),
        operands(size_t(table.count) * (sizeof(Row) + (folds ? sizeof(Operands) : 0))),
        hypers(size_t(table.count) * (sizeof(Row) + 2 * sizeof(Operands))),
        rules(hypers + rounded(size_t(groups * stride) * sizeof(HyperParameter))),
        ticket(rules + rounded(size_t(groups) * sizeof(int32_t))),
        counts(ticket + sizeof(uint4)),
        end(counts + rounded(size_t(table.count) * sizeof(float))),
        chunks{pointer<const Row>(memory + rows),
               pointer<const Operands>(memory + operands),
               int(table.count),
               int(table.chunks),
               int(kChunk),
               pointer<uint32_t>(memory + ticket),
               pointer<float>(memory + counts)},
        units(chunks),
        step{pointer<const HyperParameter>(memory + hypers),
             pointer<const int32_t>(memory + rules),
             int(stride),
             {},
             {}} {}
};

int64_t DeviceTable::bytes(const Rows& table, int64_t groups, int64_t stride) {
  return int64_t(Layout(table, 0, groups, stride, false).end);
}

DeviceTable::DeviceTable(int device, uintptr_t memory, int64_t groups, int64_t stride)
    : device_(device),
      memory_(memory),
      groups_(groups),
      stride_(stride),
      hypers_(size_t(groups * stride)),
      rules_(size_t(groups)) {}

DeviceTable::Layout DeviceTable::send(const Rows& table, uintptr_t stream, bool folds) {
  const size_t count = size_t(table.count);
  if (units_ < 0) {  // rows last as long as the table
    std::vector<Row> rows(table.rows, table.rows + count);
    const auto [units, unit] = cut(rows);
    send_bytes(reinterpret_cast<const unsigned char*>(rows.data()), count * sizeof(Row), memory_, stream);
    units_ = units, unit_ = unit;
  }
  Layout layout(table, memory_, groups_, stride_, folds);
  layout.units.pieces = units_, layout.units.size = unit_;
  send_changes(operands_[folds], table.operands, count * sizeof(Operands), memory_ + layout.operands, stream);
  std::vector<unsigned char> numbers(layout.counts - layout.hypers);  // and the ticket, which is 0 between launches
  memcpy(numbers.data(), hypers_.data(), hypers_.size() * sizeof(HyperParameter));
  memcpy(numbers.data() + layout.rules - layout.hypers, rules_.data(), rules_.size() * sizeof(int32_t));
  send_changes(numbers_, numbers.data(), numbers.size(), memory_ + layout.hypers, stream);
  return layout;
}

void DeviceTable::accumulate(const Rows& table, uintptr_t stream, const Fold& fold) {
  const Device device(device_);
  const Layout layout = send(table, stream, true);
  has_counts_ = false;
  const gpu::Work work = fold.copies() ? layout.units : layout.chunks;
  launch("accumulate", gpu::accumulate_kernel, blocks_of(work), stream, work, fold);
}

void DeviceTable::norm(const Rows& table, uintptr_t stream, const Norm& norm) {
  const Device device(device_);
  const Layout layout = send(table, stream, false);
  const gpu::Scaling scaling = gpu::make_scaling(norm.normalization, norm.device_normalization, norm.found_inf,
                                                 norm.takes_norm, norm.max_grad_norm, norm.skips_nonfinite);
  const Blocks blocks{std::max(norm.reads ? table.chunks : 1, blocks_for(table.count).count)};
  launch("norm", gpu::norm_kernel, blocks, stream, layout.chunks, norm.reads, pointer<float>(norm.partials), scaling,
         pointer<float>(norm.outcome), pointer<int64_t>(norm.skips));
  has_counts_ = true;
}

void DeviceTable::segment_norms(uintptr_t stream, uintptr_t partials, uintptr_t bounds, int64_t segments,
                                uintptr_t squares) {
  const Device device(device_);
  launch("segment norms", gpu::segment_norms_kernel, {segments}, stream, pointer<const float>(partials),
         pointer<const int64_t>(bounds), segments, pointer<double>(squares));
}

void DeviceTable::step(const Rows& table, uintptr_t stream, const std::vector<HyperParameter>& hypers,
                       const std::vector<int32_t>& rules, uintptr_t outcome, uintptr_t coefficients) {
  if (hypers.size() != hypers_.size() || rules.size() != rules_.size()) {
    throw std::invalid_argument("hypers and rules of other groups than the table's");
  }
  const Device device(device_);
  const bool carries =
      hypers.size() <= size_t(Policy::kCarriedHypers) && rules.size() <= size_t(Policy::kCarriedGroups);
  if (!carries) hypers_ = hypers, rules_ = rules;
  Layout layout = send(table, stream, false);
  if (carries) {
    layout.step.values = nullptr;
    std::copy(hypers.begin(), hypers.end(), layout.step.carried);
    std::copy(rules.begin(), rules.end(), layout.step.carried_rules);
  }
  if (!std::exchange(has_counts_, false)) {
    launch("step counts", gpu::counts_kernel, blocks_for(table.count), stream, layout.chunks);
  }
  for (int32_t rule = 0; rule < int32_t(std::size(kStep)); ++rule) {  // nearly always one for all groups
    if (std::find(rules.begin(), rules.end(), rule) == rules.end()) continue;
    launch("step", kStep[rule][!table.plain], blocks_of(layout.units), stream, layout.units, layout.step,
           pointer<const float>(outcome), pointer<const float>(coefficients), rule);
  }
}

std::string why_not(int device) {
  try {
    const Device current(device);
    const auto load = [](const char* name, auto* kernel) {
      cudaFuncAttributes attributes;
      check(cudaFuncGetAttributes(&attributes, kernel), name);
    };
    load("accumulate", gpu::accumulate_kernel);
    load("norm", gpu::norm_kernel);
    load("step counts", gpu::counts_kernel);
    load("segment norms", gpu::segment_norms_kernel);
    load("table", gpu::write_kernel<Policy::kSmallPacket>);
    load("table", gpu::write_kernel<Policy::kLargePacket>);
    for (const auto& kernels : kStep) {
      for (const StepKernel kernel : kernels) load("step", kernel);
    }
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

void allow(bool queue) { may_queue = queue; }

uint64_t capture_id(int device, uintptr_t stream) {
  const Device current(device);
  cudaStreamCaptureStatus status;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(reinterpret_cast<cudaStream_t>(stream), &status, &id), "capture");
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

}  // namespace accumfused::cuda
