#include "table.h"

#include <cstddef>
#include <cstring>
#include <unordered_map>

#include "binding.h"

namespace accumfused {
namespace {

const char kEmpty = 0;  // the address of a gradient that is there but has no elements

void* address(const dlpack::Tensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

bool float_dtype(const dlpack::DataType& type, Dtype& out) {
  if (type.lanes != 1) return false;
  if (type.code == dlpack::kFloat && type.bits == 32) out = Dtype::kFloat32;
  else if (type.code == dlpack::kFloat && type.bits == 16) out = Dtype::kFloat16;
  else if (type.code == dlpack::kBfloat && type.bits == 16) out = Dtype::kBfloat16;
  else return false;
  return true;
}

// Torch's part of a tensor lies around its sizes. Each read there takes and drops a reference, and the processor does
// not look past such atomic operations for what comes next: told in advance, a read takes 20 ns in place of 24.
constexpr size_t kAhead = 4;

void fetch(const int64_t* sizes) {
  const char* const around = reinterpret_cast<const char*>(sizes);
  __builtin_prefetch(around - 64);
  __builtin_prefetch(around);
  __builtin_prefetch(around + 64);
}

// Calls visit(object) for every parameter of the groups, in order, until it answers false; with null where one begins.
template <class Visit>
bool walk_groups(const py::list& param_groups, const Visit& visit) {
  static PyObject* const key = PyUnicode_InternFromString("params");
  for (const py::handle group : param_groups) {
    if (!visit(nullptr)) return false;
    PyObject* params = PyDict_Check(group.ptr()) ? PyDict_GetItem(group.ptr(), key) : nullptr;
    if (params == nullptr || !PyList_Check(params)) return false;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(params); ++i) {
      if (!visit(PyList_GET_ITEM(params, i))) return false;
    }
  }
  return true;
}

// Calls visit(index, param) for every parameter of the groups, and returns their number.
template <class Visit>
size_t each_param(const py::list& param_groups, const Visit& visit) {
  size_t index = 0;
  walk_groups(param_groups, [&](PyObject* param) {
    if (param != nullptr) visit(index++, param);
    return true;
  });
  return index;
}

// Calls visit(object, name) for every key, dict and entry of the optimizer's state, in order, until it answers false:
// one walk without hashing a tensor. Entries alone have a name.
template <class Visit>
bool walk_state(const py::dict& state, const Visit& visit) {
  Py_ssize_t at = 0;
  PyObject *param, *entries;
  while (PyDict_Next(state.ptr(), &at, &param, &entries)) {
    if (!visit(param, nullptr) || !visit(entries, nullptr)) return false;
    if (!PyDict_Check(entries)) continue;
    Py_ssize_t inner = 0;
    PyObject *name, *value;
    for (Py_ssize_t left = PyDict_GET_SIZE(entries); left > 0; --left) {
      if (!PyDict_Next(entries, &inner, &name, &value) || !visit(value, name)) return false;
    }
  }
  return true;
}

bool same_name(PyObject* one, PyObject* other) {
  return one == other || (PyUnicode_Check(one) && PyUnicode_Check(other) && PyUnicode_Compare(one, other) == 0);
}

// An attribute of one of torch's classes, read through its descriptor: 42 ns for p.grad against 55 through getattr.
class Getter {
 public:
  Getter(const py::object& type, const char* name) : descriptor_(type.attr(name)) {}

  py::object operator()(PyObject* object) const {
    PyObject* const value = getset()->get(object, getset()->closure);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }
  void set_none(PyObject* object) const {
    if (getset()->set(object, Py_None, getset()->closure) != 0) throw py::error_already_set();
  }

 private:
  const PyGetSetDef* getset() const { return reinterpret_cast<PyGetSetDescrObject*>(descriptor_.ptr())->d_getset; }
  py::object descriptor_;
};

// A method of one of them that takes no arguments: a sixth faster than through the object.
class Method {
 public:
  Method(const py::object& type, const char* name) : descriptor_(type.attr(name)) {
    if (!PyObject_TypeCheck(descriptor_.ptr(), &PyMethodDescr_Type)) return;
    const PyMethodDef* method = reinterpret_cast<PyMethodDescrObject*>(descriptor_.ptr())->d_method;
    if (method->ml_flags == METH_NOARGS) method_ = method->ml_meth;
  }

  py::object operator()(PyObject* object) const {
    PyObject* const value = method_ ? method_(object, nullptr) : PyObject_CallOneArg(descriptor_.ptr(), object);
    if (value == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(value);
  }

 private:
  py::object descriptor_;
  PyCFunction method_ = nullptr;
};

// What torch's classes say of tensors and their memory.
struct Torch {
  static const Torch& get() {
    static const auto* const torch = new Torch();  // never destroyed: Python may be gone by then
    return *torch;
  }

  py::object tensor = py::module_::import("torch").attr("Tensor");
  py::object storage = py::module_::import("torch").attr("_C").attr("StorageBase");
  Getter grad{tensor, "grad"}, version{tensor, "_version"}, requires_grad{tensor, "requires_grad"};
  // Whether the memory holds the values with the other sign (torch's lazy negation). Asked each time: a freed
  // gradient's object and memory may both come back as those of another.
  Method is_neg{tensor, "is_neg"};
  Method untyped_storage{tensor, "untyped_storage"}, nbytes{storage, "nbytes"}, resizable{storage, "resizable"};
  Getter storage_address{storage, "_cdata"};
};

}  // namespace

Table::Table(const py::capsule& exchange_api, const py::tuple& device, const py::list& rows)
    : api_(static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(exchange_api.ptr(), dlpack::kCapsuleName))),
      device_{device[0].cast<int32_t>(), device[1].cast<int32_t>()} {
  if (api_ == nullptr) throw py::error_already_set();
  if (api_->version.major != dlpack::kMajorVersion)
    throw std::runtime_error("DLPack exchange table of another major version");
  const size_t count = rows.size();
  rows_.resize(count);
  operands_.resize(count);
  held_.assign(count, true);  // until they are read
  for (size_t i = 0; i < count; ++i) {
    const py::object given = rows[i], tensor = given.attr("tensor"), storage = given.attr("storage");
    layouts_.push_back(layout_of(tensor.ptr()));
    sum_dtypes_.push_back(Dtype(given.attr("sum_number").cast<int32_t>()));
    Row& row = rows_[i];
    row.numel = tensor.attr("numel")().cast<int64_t>();
    row.origin = given.attr("origin").cast<int64_t>();
    row.first_chunk = int32_t(chunks_);
    row.group = given.attr("group").cast<int32_t>();
    chunks_ += chunk_count(row.numel);
    numel_ += row.numel;
    if (!layouts_[i].readable) continue;  // frozen, say: a gradient for it is refused
    row.param = address_of(tensor.ptr());
    row.weights = Weights(given.attr("form").attr("weights").cast<int32_t>());
    row.states = States(given.attr("form").attr("states").cast<int32_t>());
    plain_ &= row.is_plain();
    if (storage.is_none()) continue;  // it has none yet
    const py::list entries = storage.attr("slots")();
    size_t next = 0;
    const auto take = [&] {
      PyObject* entry = PyList_GET_ITEM(entries.ptr(), next++);
      return entry == Py_None ? nullptr : address_of(entry);
    };
    row.step = static_cast<float*>(take());
    row.seed = static_cast<const int64_t*>(take());
    row.master = take();
    for (void*& state : row.state) state = take();
    for (uint8_t*& scale : row.scale) scale = static_cast<uint8_t*>(take());
  }
}

bool Table::read(PyObject* object, dlpack::Tensor& out) const {
  if (object == Py_None || api_->dltensor_from_py_object_no_sync(object, &out) != 0) {
    PyErr_Clear();
    return false;
  }
  return true;
}

bool Table::is_addressable(const dlpack::Tensor& tensor) const {
  bool empty = false;
  for (int32_t d = 0; d < tensor.ndim; ++d) empty |= tensor.shape[d] == 0;
  Dtype dtype;
  return float_dtype(tensor.dtype, dtype) && is_here(tensor) && (empty || tensor.data != nullptr);
}

bool Table::same_layout(const Layout& layout, const dlpack::Tensor& tensor) const {
  if (!layout.readable || layout.ndim != tensor.ndim || !is_here(tensor)) return false;
  const int64_t* const sizes = shapes_.data() + layout.shape;
  const int64_t* const strides = sizes + layout.ndim;
  bool same_strides = true, empty = false;
  for (int32_t d = 0; d < layout.ndim; ++d) {
    if (sizes[d] != tensor.shape[d]) return false;
    same_strides &= strides[d] == tensor.strides[d] || sizes[d] == 1;
    empty |= sizes[d] == 0;
  }
  return same_strides || empty;
}

Table::Layout Table::layout_of(PyObject* object) {
  Layout layout;
  dlpack::Tensor tensor;
  if (!read(object, tensor) || !is_addressable(tensor)) return layout;
  return {true, tensor.ndim, keep_shape(tensor)};
}

size_t Table::keep_shape(const dlpack::Tensor& tensor) {
  const size_t at = shapes_.size();
  shapes_.insert(shapes_.end(), tensor.shape, tensor.shape + tensor.ndim);
  shapes_.insert(shapes_.end(), tensor.strides, tensor.strides + tensor.ndim);
  return at;
}

void* Table::address_of(PyObject* object) const {
  dlpack::Tensor tensor;
  if (!read(object, tensor)) throw std::runtime_error("a tensor without memory");
  return address(tensor);
}

Table::Watched Table::watch(PyObject* object, PyObject* name) {
  Watched watched{object, nullptr, nullptr, 0, 0};
  if (object == nullptr) return watched;
  if (name != nullptr) {
    while (watched.name < names_.size() && !same_name(names_[watched.name].ptr(), name)) ++watched.name;
    if (watched.name == names_.size()) names_.push_back(py::reinterpret_borrow<py::object>(name));
  }
  dlpack::Tensor tensor;
  const bool is_tensor = read(object, tensor);
  const auto same = [&](const Kind& kind) {
    return kind.type == Py_TYPE(object) && kind.is_tensor == is_tensor && (!is_tensor || is_of(kind, tensor));
  };
  // Mostly one of the last kinds: a parameter's states look like those of the one before.
  watched.kind = uint32_t(kinds_.size());
  while (watched.kind > 0 && !same(kinds_[watched.kind - 1])) --watched.kind;
  if (watched.kind == 0) {
    kinds_.push_back({Py_TYPE(object), is_tensor, tensor, is_tensor ? keep_shape(tensor) : 0});
    watched.kind = uint32_t(kinds_.size());
  }
  --watched.kind;
  if (is_tensor) watched.data = tensor.data, watched.sizes = tensor.shape;
  return watched;
}

void Table::remember(const py::list& param_groups, const py::dict& state) {
  params_.clear();
  state_.clear();
  kinds_.clear();
  names_.assign(1, py::none());
  walk_groups(param_groups, [&](PyObject* param) { return params_.push_back(watch(param)), true; });
  walk_state(state, [&](PyObject* object, PyObject* name) {
    state_.push_back(watch(object, name));
    return true;
  });
}

bool Table::is_of(const Kind& kind, const dlpack::Tensor& tensor) const {
  // Device, number of dimensions and dtype, which stand between address and sizes; then sizes and strides.
  constexpr size_t kFrom = offsetof(dlpack::Tensor, device), kTo = offsetof(dlpack::Tensor, shape);
  const auto* const now = reinterpret_cast<const char*>(&tensor);
  if (memcmp(now + kFrom, reinterpret_cast<const char*>(&kind.seen) + kFrom, kTo - kFrom) != 0) return false;
  const int64_t* const sizes = shapes_.data() + kind.shape;
  bool same = tensor.byte_offset == kind.seen.byte_offset;
  for (int32_t d = 0; d < tensor.ndim; ++d) {
    same &= tensor.shape[d] == sizes[d] && tensor.strides[d] == sizes[tensor.ndim + d];
  }
  return same;
}

bool Table::same_memory(const Watched& watched, PyObject* object) const {
  const Kind& kind = kinds_[watched.kind];
  dlpack::Tensor tensor;
  return Py_TYPE(object) == kind.type && read(object, tensor) && tensor.data == watched.data && is_of(kind, tensor);
}

bool Table::unchanged(const py::list& param_groups, const std::optional<py::dict>& state) const {
  // The next of the remembered objects, if it is this one.
  const auto next = [](const std::vector<Watched>& all, size_t& at, PyObject* object) -> const Watched* {
    if (at >= all.size() || all[at].object != object) return nullptr;
    if (at + kAhead < all.size()) fetch(all[at + kAhead].sizes);
    return &all[at++];
  };
  size_t params = 0, entries = 0;
  const bool same_params = walk_groups(param_groups, [&](PyObject* param) {
    const Watched* const known = next(params_, params, param);
    if (known == nullptr || param == nullptr) return known != nullptr;
    dlpack::Tensor tensor;
    return kinds_[known->kind].is_tensor ? same_memory(*known, param) : !read(param, tensor);  // may be readable now
  });
  if (!same_params || params != params_.size()) return false;
  if (!state) return true;
  const bool same_state = walk_state(*state, [&](PyObject* object, PyObject* name) {
    const Watched* const known = next(state_, entries, object);
    if (known == nullptr) return false;
    if (name == nullptr) return true;  // a parameter, which was compared, or a dict
    return same_name(names_[known->name].ptr(), name) &&
           (!kinds_[known->kind].is_tensor || same_memory(*known, object));
  });
  return same_state && entries == state_.size();
}

bool Table::set_grad(size_t index, PyObject* grad) {
  Operands& in = operands_[index];
  const bool empty = rows_[index].numel == 0;
  in.grad = nullptr;
  if (grad == Py_None) return true;
  dlpack::Tensor tensor;
  // A subclass may keep its values elsewhere.
  if (Py_TYPE(grad) != reinterpret_cast<PyTypeObject*>(Torch::get().tensor.ptr()) || !read(grad, tensor)) return false;
  if (Torch::get().is_neg(grad).ptr() == Py_True) return false;
  if (!float_dtype(tensor.dtype, in.grad_dtype) || !same_layout(layouts_[index], tensor)) return false;
  if (!empty && tensor.data == nullptr) return false;  // zeros that are nowhere (torch._efficientzerotensor)
  in.grad = empty ? &kEmpty : address(tensor);
  return true;
}

int64_t Table::set_grads(const py::list& grads) {
  int64_t refused = -1;
  for (size_t i = rows_.size(); i-- > 0;) {
    if (!set_grad(i, PyList_GET_ITEM(grads.ptr(), i))) refused = int64_t(i);
  }
  return refused;
}

py::tuple Table::read_grads(const py::list& param_groups, Py_ssize_t own_references) {
  py::list grads(rows_.size());
  int64_t present = 0, refused = -1;
  bool any_held = false;
  if (each_param(param_groups, [](size_t, PyObject*) {}) != rows_.size())
    throw std::runtime_error("param_groups have changed since the plan was made");
  each_param(param_groups, [&](size_t i, PyObject* param) {
    PyObject* grad = Torch::get().grad(param).release().ptr();
    held_[i] = grad != Py_None && Py_REFCNT(grad) > own_references;
    any_held |= held_[i];
    PyList_SET_ITEM(grads.ptr(), i, grad);
    present += grad != Py_None;
    if (!set_grad(i, grad) && refused < 0) refused = int64_t(i);
  });
  if (any_held) hold_shared(grads);
  return py::make_tuple(grads, present, refused);
}

// One that two parameters have is held, for the second of them, by the list; the first has it too.
void Table::hold_shared(const py::list& grads) {
  std::unordered_map<PyObject*, size_t> first;
  for (size_t i = 0; i < rows_.size(); ++i) {
    const auto [known, is_new] = first.emplace(PyList_GET_ITEM(grads.ptr(), i), i);
    if (!is_new && known->first != Py_None) held_[known->second] = true;
  }
}

py::list Table::held() const {
  py::list held(held_.size());
  for (size_t i = 0; i < held_.size(); ++i) held[i] = bool(held_[i]);
  return held;
}

void Table::release_grads(const py::list& param_groups) {
  each_param(param_groups, [](size_t, PyObject* param) { Torch::get().grad.set_none(param); });
}

bool Table::adoptable(const py::list& grads, const py::object& uses, int64_t own_uses) const {
  const Torch& torch = Torch::get();
  for (size_t i = 0; i < rows_.size(); ++i) {
    PyObject* const grad = PyList_GET_ITEM(grads.ptr(), i);
    if (grad == Py_None || held_[i] || operands_[i].grad_dtype != sum_dtypes_[i]) return false;
    if (torch.requires_grad(grad).ptr() == Py_True) return false;
    const py::object storage = torch.untyped_storage(grad);
    const py::object address = torch.storage_address(storage.ptr());
    if (uses(address).cast<int64_t>() != own_uses || torch.resizable(storage.ptr()).ptr() != Py_True) return false;
    const int64_t bytes = sum_dtypes_[i] == Dtype::kFloat32 ? sizeof(float) : sizeof(uint16_t);
    if (torch.nbytes(storage.ptr()).cast<int64_t>() != rows_[i].numel * bytes) return false;
  }
  return true;
}

int64_t Table::present(const py::list& param_groups) {
  int64_t present = 0;
  each_param(param_groups, [&](size_t, PyObject* param) { present += !Torch::get().grad(param).is_none(); });
  return present;
}

int64_t Table::versions(const py::list& param_groups, size_t first, size_t every) {
  int64_t sum = 0;
  each_param(param_groups, [&](size_t i, PyObject* param) {
    if (i >= first && (i - first) % every == 0) sum += Torch::get().version(param).cast<int64_t>();
  });
  return sum;
}

int64_t Table::set_sums(const py::list& sums) {
  for (size_t i = 0; i < rows_.size(); ++i) {
    Operands& in = operands_[i];
    in.sum = nullptr;
    PyObject* sum = PyList_GET_ITEM(sums.ptr(), i);
    if (sum == Py_None) continue;
    dlpack::Tensor tensor;
    if (!read(sum, tensor) || !same_layout(layouts_[i], tensor)) return int64_t(i);
    if (!float_dtype(tensor.dtype, in.sum_dtype) || in.sum_dtype == Dtype::kFloat16) return int64_t(i);
    in.sum = rows_[i].numel == 0 ? const_cast<char*>(&kEmpty) : address(tensor);
  }
  return -1;
}

void Table::take_sums() {
  for (Operands& in : operands_) {
    in.grad = in.sum;
    in.grad_dtype = in.sum_dtype;
  }
}

void Table::keep_grads() {
  for (Operands& in : operands_) in.sum = const_cast<void*>(in.grad), in.sum_dtype = in.grad_dtype;
}

int64_t Table::overwritten() const {
  for (size_t i = 0; i < rows_.size(); ++i) {
    if (operands_[i].grad != nullptr && operands_[i].grad == operands_[i].sum && rows_[i].numel > 0) return int64_t(i);
  }
  return -1;
}

Fold make_fold(const GivenNumber& factor, uintptr_t before, bool overwrites, bool copies, uintptr_t partials,
               uintptr_t words, uint64_t salt) {
  return {{factor.first, pointer<const double>(factor.second)},
          pointer<const double>(before),
          overwrites,
          copies,
          pointer<float>(partials),
          pointer<uint64_t>(words),
          salt};
}

void bind_table(py::module_& m) {
  py::class_<Table>(m, "Table", py::module_local())
      .def(py::init<const py::capsule&, const py::tuple&, const py::list&>(), py::arg("exchange_api"),
           py::arg("device"), py::arg("rows"))
      .def("remember", &Table::remember, py::arg("param_groups"), py::arg("state"))
      .def("unchanged", &Table::unchanged, py::arg("param_groups"), py::arg("state").none(true))
      .def("read_grads", &Table::read_grads, py::arg("param_groups"), py::arg("own_references"))
      .def("held", &Table::held)
      .def_static("release_grads", &Table::release_grads, py::arg("param_groups"))
      .def("set_grads", &Table::set_grads, py::arg("grads"))
      .def("set_sums", &Table::set_sums, py::arg("sums"))
      .def("take_sums", &Table::take_sums)
      .def("keep_grads", &Table::keep_grads)
      .def_readwrite("first_row", &Table::first_row)
      .def("overwritten", &Table::overwritten)
      .def("adoptable", &Table::adoptable, py::arg("grads"), py::arg("uses"), py::arg("own_uses"))
      .def_static("present", &Table::present, py::arg("param_groups"))
      .def_static("versions", &Table::versions, py::arg("param_groups"), py::arg("first"), py::arg("every"))
      .def_property_readonly("chunks", &Table::chunks);
}

}  // namespace accumfused
