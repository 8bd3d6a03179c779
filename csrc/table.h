// The plan's table: a set of tensors as rows of addresses, read through torch's DLPack exchange table, and the check
// that nothing has moved since. Knows Python and DLPack, not torch's ABI.
//
// The table owns no tensor, and no DLPack handle. What a loop frees is freed, and a plan that has outlived its tensors
// is only compared, never followed: each look begins at the objects that param_groups and the optimizer's state hold
// now. A pointer that it remembers is a number. (A handle on each tensor would make a read cheaper, 18 ns against 40,
// because torch need not hand the ownership back and forth between Python and C++; but torch refuses to swap a tensor
// that somebody holds, and its memory would live as long as the plan.)
#pragma once
#include <pybind11/pybind11.h>

#include <optional>
#include <vector>

#include "dlpack_abi.h"
#include "rows.h"

namespace accumfused {

namespace py = pybind11;

class Table {
 public:
  // rows: accumfused/core/rows.py's; the storage of each gives its tensors in the order of our Row from `step` on.
  // device: DLPack's type and index of the memory that the kernels work on. A tensor that lies elsewhere has a row, and
  // its place in the order of chunks, but no address: a gradient for it is refused.
  Table(const py::capsule& exchange_api, const py::tuple& device, const py::list& rows);

  // Remembers which objects param_groups and the optimizer's state hold, under which names, and their memory...
  void remember(const py::list& param_groups, const py::dict& state);
  // ...and says whether all of it is still the same. Without a state it asks only for the parameters: a fold needs no
  // more.
  bool unchanged(const py::list& param_groups, const std::optional<py::dict>& state) const;

  // Every p.grad of the groups' parameters, to which the rows then point: (gradients, how many are there, the first
  // index that the kernels cannot take as it is, or -1). Such a gradient has another device, dtype, shape or strides
  // than its parameter. own_references: how many Python references p.grad has just after it was read, where nobody else
  // holds one.
  py::tuple read_grads(const py::list& param_groups, Py_ssize_t own_references);
  // Of the gradients that were read last: which of them somebody else holds, too, or another parameter has.
  py::list held() const;
  // Whether each of these gradients, just read, has the dtype of sums, and memory that nobody else can write: held by
  // nobody, and a whole storage that torch owns and no other tensor has. uses tells how often a storage (its address)
  // is used, own_uses that number for a storage of one tensor.
  bool adoptable(const py::list& grads, const py::object& uses, int64_t own_uses) const;
  // How many parameters have a p.grad, and the sum of the version counters of each every-th parameter from first on.
  static int64_t present(const py::list& param_groups);
  static int64_t versions(const py::list& param_groups, size_t first, size_t every);
  // p.grad = None for every parameter.
  static void release_grads(const py::list& param_groups);
  // As read_grads, for gradients that are given; returns that index or -1.
  int64_t set_grads(const py::list& grads);
  // Points the rows at their sums in fp32 or bf16 (None: not folded). Returns -1, or the first index whose sum does not
  // fit.
  int64_t set_sums(const py::list& sums);
  void take_sums();   // the sums are the gradients
  void keep_grads();  // the gradients become the sums
  // The first index whose gradient lies at its sum's address, or -1.
  int64_t overwritten() const;

  Rows rows() const { return {rows_.data(), operands_.data(), int64_t(rows_.size()), chunks_, plain_, first_row}; }
  int64_t chunks() const { return chunks_; }
  int64_t numel() const { return numel_; }

  int64_t first_row = 0;  // see Rows

 private:
  struct Layout {
    bool readable = false;  // memory of floats that a kernel can address
    int32_t ndim = 0;
    size_t shape = 0;  // where its sizes and strides stand in shapes_
  };
  // The kind of an object that param_groups or the state held: few differ, so thousands of objects stay small.
  struct Kind {
    const void* type = nullptr;
    bool is_tensor = false;    // with memory; its numbers follow
    dlpack::Tensor seen = {};  // but for the address
    size_t shape = 0;          // where its sizes and strides stand in shapes_
  };
  struct Watched {
    const void* object;  // its identity; null: here a group begins
    const void* data;
    const int64_t* sizes;  // where torch keeps them, to fetch ahead
    uint32_t kind;
    uint32_t name;  // in names_: of an entry of a parameter's state; 0: it is none
  };
  bool set_grad(size_t index, PyObject* grad);
  void hold_shared(const py::list& grads);
  bool read(PyObject* object, dlpack::Tensor& out) const;
  Layout layout_of(PyObject* object);
  size_t keep_shape(const dlpack::Tensor& tensor);
  bool is_here(const dlpack::Tensor& tensor) const {
    return tensor.device.type == device_.type && tensor.device.id == device_.id;
  }
  bool is_addressable(const dlpack::Tensor& tensor) const;  // memory of floats that a kernel can write
  bool same_layout(const Layout& layout, const dlpack::Tensor& tensor) const;
  void* address_of(PyObject* object) const;
  Watched watch(PyObject* object, PyObject* name = nullptr);
  bool is_of(const Kind& kind, const dlpack::Tensor& tensor) const;
  bool same_memory(const Watched& watched, PyObject* object) const;

  const dlpack::ExchangeApi* api_;
  dlpack::Device device_;
  std::vector<Row> rows_;
  std::vector<Operands> operands_;
  std::vector<bool> held_;
  std::vector<Layout> layouts_;  // of params, and so of gradients, accumulators and states
  std::vector<Dtype> sum_dtypes_;
  int64_t chunks_ = 0;
  int64_t numel_ = 0;
  bool plain_ = true;

  std::vector<int64_t> shapes_;
  std::vector<Watched> params_;  // of param_groups, in order
  std::vector<Watched> state_;   // each key, dict and entry, in order
  std::vector<Kind> kinds_;
  std::vector<py::object> names_;
};

}  // namespace accumfused
