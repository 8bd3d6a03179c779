// Prints a digest for each of many problems, of the CPU's baseline kernels: test_aarch64.py compares processors.
//
// Each rule takes three steps with every format of weights and states, from gradients of each dtype, clipped by their
// norm. Sums of windows are made in all ways. Values come from a counter's hash, so nothing depends on a library.
#include <cstdio>
#include <string>
#include <vector>

#define AF_TARGET baseline
#include "../../csrc/codecs.h"
#include "../../csrc/cpu/kernels.h"
#include "../../csrc/norm.h"
#include "../../csrc/rules.h"

namespace {

using namespace accumfused;
using namespace accumfused::baseline;
using Bytes = std::vector<unsigned char>;

constexpr int kSteps = 3;
constexpr size_t kBytes[] = {4, 2, 2};  // of a Dtype
constexpr Dtype kParams[] = {Dtype::kFloat32, Dtype::kBfloat16, Dtype::kBfloat16, Dtype::kBfloat16, Dtype::kFloat16};
constexpr size_t kMasterBytes[] = {0, 0, 2, 1, 4};  // of Weights
constexpr size_t kStateBytes[] = {4, 2, 1};         // of States
const std::vector<int64_t> kSizes = {5, 129, 1029}, kLarge = {5, kChunk + 70};

uint64_t drawn = 0;
uint64_t draw() { return mix(++drawn); }

// Mostly of sizes from 2^-10 to 2^5, some of any size, zeros and subnormals among them.
float draw_value(bool is_special) {
  constexpr uint32_t kSpecial[] = {0x00000000, 0x80000000, 0x000116c2, 0x80000001, 0x7f7fffff, 0x7f800000, 0xff800000};
  const uint64_t bits = draw();
  const uint32_t sign = bits >> 63 ? 0x80000000u : 0u, mantissa = uint32_t(bits) & 0x7fffffu;
  if (is_special && bits >> 32 & 1) return float_from_bits(kSpecial[(bits >> 33) % 7]);
  const uint32_t exponent = is_special ? bits >> 40 & 0xff : 117 + (bits >> 40 & 15);
  return float_from_bits(sign | exponent << 23 | mantissa);
}

Bytes values(int64_t count, Dtype dtype, bool is_special) {
  Bytes out(size_t(count) * kBytes[int(dtype)] + 64);  // a NULL address would mean that there is none
  for (int64_t i = 0; i < count; ++i) {
    const float value = draw_value(is_special);
    const uint16_t half = dtype == Dtype::kFloat16 ? to_float16(value).bits : to_bfloat16(value, 0x80000000u).bits;
    if (dtype == Dtype::kFloat32) memcpy(&out[size_t(i) * 4], &value, 4);
    else memcpy(&out[size_t(i) * 2], &half, 2);
  }
  return out;
}

// FNV-1a. Which NaN comes of an operation is the processor's choice: all count as one.
struct Digest {
  uint64_t value = 0xcbf29ce484222325u;

  void add(uint64_t word) { value = (value ^ word) * 0x100000001b3u; }
  void add_floats(const void* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      float number;
      memcpy(&number, static_cast<const char*>(from) + 4 * i, 4);
      add(bits_or_nan(number));
    }
  }
  void add_halves(const void* from, int64_t count, uint16_t infinity) {
    for (int64_t i = 0; i < count; ++i) {
      uint16_t bits;
      memcpy(&bits, static_cast<const char*>(from) + 2 * i, 2);
      add((bits & 0x7fffu) > infinity ? 0x7fffu : bits);
    }
  }
  void add_bytes(const void* from, size_t count) {
    for (size_t i = 0; i < count; ++i) add(static_cast<const unsigned char*>(from)[i]);
  }
  // Blocks whose scale makes NaN of all their codes count as their scale.
  void add_codes(const unsigned char* codes, const unsigned char* scale, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      const unsigned char exponent = scale[i / kQuantBlock];
      add(exponent == 255 ? 256u : codes[i]), add(exponent);
    }
  }
  void add_values(const void* from, int64_t count, Dtype dtype) {
    if (dtype == Dtype::kFloat32) add_floats(from, count);
    else add_halves(from, count, dtype == Dtype::kFloat16 ? 0x7c00u : 0x7f80u);
  }
};

// Rows of these sizes with memory of their own.
struct Memory {
  std::vector<Bytes> blocks;
  std::vector<Row> rows;
  std::vector<Operands> operands;
  std::vector<float> partials;
  int64_t chunks = 0;
  bool plain = true;

  explicit Memory(const std::vector<int64_t>& sizes) {
    for (int64_t size : sizes) {
      Row row;
      row.numel = size, row.first_chunk = int32_t(chunks), chunks += chunk_count(size);
      rows.push_back(row), operands.push_back({});
    }
    partials.resize(size_t(chunks));
  }
  void* keep(Bytes bytes) { return blocks.push_back(std::move(bytes)), blocks.back().data(); }
  void* zeros(size_t bytes) { return keep(Bytes(bytes + 64)); }
  void set_grads(Dtype dtype, bool is_special) {
    for (size_t i = 0; i < rows.size(); ++i) {
      operands[i].grad = keep(values(rows[i].numel, dtype, is_special)), operands[i].grad_dtype = dtype;
    }
  }
  cpu::Work work() const { return {{rows.data(), operands.data(), int64_t(rows.size()), chunks, plain}, 1}; }
};

void print(const std::string& name, const Digest& digest) {
  printf("%s %016llx\n", name.c_str(), (unsigned long long)digest.value);
}

void try_steps(const cpu::Kernels& kernels, const cpu::RuleInfo& rule, const cpu::RuleCode& code, int weights,
               int states, Dtype dtype, bool is_special) {
  Digest digest;
  const bool plain = weights == 0 && states == 0;
  Memory memory(plain && !is_special ? kLarge : kSizes);
  memory.plain = plain;
  const int64_t seed = 7;
  for (size_t i = 0; i < memory.rows.size(); ++i) {
    Row& row = memory.rows[i];
    const size_t size = size_t(row.numel);
    row.weights = Weights(weights), row.states = States(states), row.seed = &seed, row.origin = int64_t(i);
    if (rule.counts_steps) row.step = static_cast<float*>(memory.zeros(4));
    row.param = memory.keep(values(row.numel, kParams[weights], is_special));
    if (kMasterBytes[weights]) row.master = memory.zeros(size * kMasterBytes[weights]);
    for (int k = 0; k < rule.states; ++k) {
      row.state[k] = memory.zeros(size * kStateBytes[states]);
      if (states == 2) row.scale[k] = static_cast<uint8_t*>(memory.zeros(size / kQuantBlock + 1));
    }
  }
  double hypers[kMaxHypers];
  for (int k = 0; k < rule.hypers; ++k) {
    hypers[k] = double(draw() >> 11) * 0x1p-53;
    if (rule.hyper_names[k] == std::string("maximize")) hypers[k] = draw() & 1;
  }
  for (int step = 0; step < kSteps; ++step) {
    memory.set_grads(dtype, is_special);
    kernels.norm(memory.work(), memory.partials.data());
    const double sum = sum_partials(memory.partials.data(), memory.chunks);
    float outcome[3];
    finish_norm(make_scaling(3.0, 0, 0, true, is_special ? std::nullopt : std::optional(1.0), false), sum, outcome,
                nullptr);
    digest.add_floats(outcome, 3);
    if (is_special) outcome[0] = 1.0f;  // else nothing but NaN would come
    const cpu::RuleCode* const codes[] = {&code};
    kernels.step(memory.work(), {hypers, codes, kMaxHypers, outcome, nullptr});
  }
  for (const Row& row : memory.rows) {
    const size_t size = size_t(row.numel);
    digest.add_values(row.param, row.numel, kParams[weights]);
    if (kMasterBytes[weights] == 4) digest.add_floats(row.master, row.numel);
    else digest.add_bytes(row.master, size * kMasterBytes[weights]);
    if (row.step) digest.add_floats(row.step, 1);
    for (int k = 0; k < rule.states; ++k) {
      if (states == 0) digest.add_floats(row.state[k], row.numel);
      else if (states == 1) digest.add_halves(row.state[k], row.numel, 0x7f80u);
      else digest.add_codes(static_cast<const uint8_t*>(row.state[k]), row.scale[k], size);
    }
  }
  print(std::string(rule.name) + " weights " + std::to_string(weights) + " states " + std::to_string(states) +
            " gradients " + std::to_string(int(dtype)) + (is_special ? " special" : ""),
        digest);
}

void try_folds(const cpu::Kernels& kernels, Dtype dtype, bool is_special) {
  const double none = 0.0, some = 2.0;
  const Number half{0.5, nullptr}, nothing{0.0, nullptr}, one{1.0, nullptr}, replayed{0.0, &half.number};
  for (const Fold& fold :
       {Fold{one, nullptr, true, nullptr}, Fold{half, nullptr, true, nullptr}, Fold{half, nullptr, false, nullptr},
        Fold{nothing, nullptr, false, nullptr}, Fold{nothing, nullptr, true, nullptr},
        Fold{replayed, &none, false, nullptr}, Fold{replayed, &some, false, nullptr}}) {
    Digest digest;
    Memory memory({5, 129, 1029, kChunk + 70});
    memory.set_grads(dtype, is_special);
    for (size_t i = 0; i < memory.rows.size(); ++i) {
      memory.operands[i].sum =
          reinterpret_cast<float*>(memory.keep(values(memory.rows[i].numel, Dtype::kFloat32, is_special)));
    }
    memory.operands[1].grad = nullptr;
    Fold now = fold;
    now.partials = memory.partials.data();
    kernels.accumulate(memory.work(), now);
    for (size_t i = 0; i < memory.rows.size(); ++i) digest.add_floats(memory.operands[i].sum, memory.rows[i].numel);
    digest.add_floats(memory.partials.data(), memory.chunks);
    print("fold, gradients " + std::to_string(int(dtype)) + (is_special ? " special" : ""), digest);
  }
}

}  // namespace

#define AF_INFO(Rule) \
  {Rule::kName, Rule::kDigest, Rule::kStates, Rule::kStateNames, Rule::kCountsSteps, Rule::kHypers, Rule::kHyperNames},

int main() {
  const cpu::Kernels& kernels = cpu::kBaseline;
  const std::vector<cpu::RuleInfo> rules = {AF_RULES(AF_INFO)};
  for (const Dtype dtype : {Dtype::kFloat32, Dtype::kFloat16, Dtype::kBfloat16}) {
    for (const bool is_special : {false, true}) {
      try_folds(kernels, dtype, is_special);
      for (size_t i = 0; i < rules.size(); ++i) {
        try_steps(kernels, rules[i], kernels.rules[i], 0, 0, dtype, is_special);
      }
    }
  }
  int turn = 0;
  for (size_t i = 0; i < rules.size(); ++i) {
    for (int weights = 0; weights < 5; ++weights) {
      for (int states = weights == 0; states < 3; ++states) {
        for (const bool is_special : {false, true}) {
          try_steps(kernels, rules[i], kernels.rules[i], weights, states, Dtype(turn++ % 3), is_special);
        }
      }
    }
  }
}
