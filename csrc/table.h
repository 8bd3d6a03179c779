// The plan's table: a set of tensors as rows of addresses, read through torch's DLPack exchange table, and the check
// that nothing has moved since. Knows Python and DLPack, not torch's ABI.
//
// The table points to Python objects that its plan keeps alive, and owns a DLPack handle on every parameter and state.
// That keeps their memory alive as long as a row points to it, and a read costs 18 ns against 48, because torch need
// not hand the ownership of the tensor back and forth between Python and C++ (torch 2.13, EPYC, 2 cores).
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <vector>

#include "dlpack_abi.h"
#include "rows.h"

namespace accumfused {

namespace py = pybind11;

class Table {
 public:
  // rows: accumfused/core/plan.py's. Each keeps its tensors alive, and its storage gives them in the order of our Row
  // from `step` on. device: DLPack's type and index of the memory that the kernels work on. A tensor that lies
  // elsewhere has a row, and its place in the order of chunks, but no address: a gradient for it is refused.
  Table(const py::capsule& exchange_api, const py::tuple& device, const py::list& rows);

  // Remembers which objects param_groups and the optimizer's state hold...
  void remember(const py::list& param_groups, const py::dict& state);
  // ...and says whether they, and the memory behind them, are still the same. Without a state it asks only for the
  // parameters: a fold needs no more.
  bool unchanged(const py::list& param_groups, const std::optional<py::dict>& state) const;

  // Every p.grad, and points the rows at them: (gradients, how many are there, the first index that the kernels cannot
  // take as it is, or -1). Such a gradient has another device, dtype, shape or strides than its parameter.
  // own_references: how many Python references p.grad has just after it was read, where nobody else holds one.
  py::tuple read_grads(Py_ssize_t own_references);
  // Of the gradients that were read last: which of them somebody else holds, too, or another parameter has.
  py::list held() const;
  // Whether each of these gradients, just read, is fp32 memory that nobody else can write: held by nobody, and a whole
  // storage that torch owns and no other tensor has. uses tells how often a storage (its address) is used, own_uses
  // that number for a storage of one tensor.
  bool adoptable(const py::list& grads, const py::object& uses, int64_t own_uses) const;
  // How many parameters have a p.grad, and the sum of the version counters of each every-th parameter from first on.
  int64_t present() const;
  int64_t versions(size_t first, size_t every) const;
  // p.grad = None for every parameter.
  void release_grads();
  // As read_grads, for gradients that are given; returns that index or -1.
  int64_t set_grads(const py::list& grads);
  // Points the rows at their fp32 sums (None: not folded). Returns -1, or the first index whose sum does not fit.
  int64_t set_sums(const py::list& sums);
  void take_sums();   // the sums are the gradients
  void keep_grads();  // the gradients become the sums
  // The first index whose gradient lies at its sum's address, or -1.
  int64_t overwritten() const;

  Rows rows() const { return {rows_.data(), operands_.data(), int64_t(rows_.size()), chunks_, plain_}; }
  int64_t chunks() const { return chunks_; }
  int64_t numel() const { return numel_; }

 private:
  struct Layout {
    bool readable = false;  // memory of floats that a kernel can address
    int32_t ndim = 0;
    size_t shape = 0;  // where its sizes and strides stand in shapes_
  };
  struct Watched {
    PyObject* object;
    dlpack::Tensor seen;
    size_t shape;  // where its sizes and strides stand in shapes_
    bool is_param = false;
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
  void* own(PyObject* object);  // its address

  const dlpack::ExchangeApi* api_;
  dlpack::Device device_;
  std::vector<PyObject*> owners_;
  std::vector<Layout> owner_layouts_;
  std::vector<Row> rows_;
  std::vector<Operands> operands_;
  std::vector<bool> held_;
  std::vector<Layout> layouts_;  // of params, and so of gradients, accumulators and states
  int64_t chunks_ = 0;
  int64_t numel_ = 0;
  bool plain_ = true;

  struct Release {
    void operator()(dlpack::ManagedTensor* handle) const { handle->deleter(handle); }
  };
  std::vector<std::unique_ptr<dlpack::ManagedTensor, Release>> handles_;
  std::vector<int64_t> shapes_;
  std::vector<Watched> watched_;         // tensors whose memory must not move
  std::vector<PyObject*> group_params_;  // param_groups, flattened
  std::vector<PyObject*> state_walk_;    // state: key, dict and entries, in order
};

}  // namespace accumfused
