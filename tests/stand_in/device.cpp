// A device "cuda:0" without a GPU: its tensors lie in host memory and are computed by the CPU's kernels, and an operation
// that mixes them with tensors of the CPU is reported, as a GPU would refuse it. It takes the place of every CUDA kernel of
// the process, so it belongs into a process of its own.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

using at::Tensor;
using c10::IValue;
using Stack = std::vector<IValue>;

const c10::Device kStandIn(c10::DeviceType::CUDA, 0);
PyObject* on_mixed = nullptr;  // on_mixed(operation, shapes): called with the lock of Python, may raise

// Autograd asks for streams, events and the number of devices; here everything happens at once.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return kStandIn; }
  c10::Device getDevice() const override { return kStandIn; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kStandIn); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// Pinned memory is memory of the CPU that is remembered.
struct PinnedMemory final : c10::Allocator {
  static std::set<const void*>& pinned() {
    static std::set<const void*> addresses;
    return addresses;
  }
  static std::mutex& mutex() {
    static std::mutex lock;
    return lock;
  }
  static void free(void* memory) {
    {
      std::lock_guard<std::mutex> lock(mutex());
      pinned().erase(memory);
    }
    c10::GetAllocator(c10::DeviceType::CPU)->raw_deallocate(memory);
  }
  c10::DataPtr allocate(size_t size) override {
    auto* memory = c10::GetAllocator(c10::DeviceType::CPU)->raw_allocate(size);
    std::lock_guard<std::mutex> lock(mutex());
    if (memory) pinned().insert(memory);
    return {memory, memory, &free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};

// What torch asks the CUDA library.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  c10::Device getDeviceFromPtr(void*) const override { return kStandIn; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  bool isPinnedPtr(const void* memory) const override {
    std::lock_guard<std::mutex> lock(PinnedMemory::mutex());
    return PinnedMemory::pinned().count(memory) > 0;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedMemory allocator;
    return &allocator;
  }
};

// torch has made its own hooks by now and keeps them for good, so theirs get our functions; ours have no data.
void replace_hooks() {
  static Hooks ours;
  auto* theirs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(theirs), static_cast<const void*>(&ours), sizeof(void*));
}

bool on_stand_in(const Tensor& tensor) { return tensor.defined() && tensor.device().is_cuda(); }

// The same memory under another device. The new storage keeps the old one alive.
c10::Storage under(const c10::Storage& storage, c10::Device device) {
  auto* owner = new c10::Storage(storage);
  auto free = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  auto memory = c10::DataPtr(const_cast<void*>(storage.data()), owner, free, device);
  auto* allocator = device.is_cpu() ? c10::GetAllocator(c10::DeviceType::CPU) : nullptr;
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), allocator, device.is_cpu());
}

Tensor with_storage(const Tensor& like, c10::Storage storage) {
  auto key = storage.device().is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_neg()) impl->_set_neg(true);
  return tensor;
}

// One call: the arguments as tensors of the CPU, and the way back.
struct Call {
  std::unordered_map<c10::StorageImpl*, c10::Storage> aliases;  // storage of the stand-in -> the same for the CPU
  std::unordered_map<c10::StorageImpl*, c10::Storage> origins;  // and back
  std::vector<std::pair<Tensor, Tensor>> moved;                 // argument, its alias
  std::vector<Tensor> plain;                                    // arguments of the CPU
  std::vector<Tensor> wrong;                                    // those of them that must not be there
  c10::optional<c10::Device> target;

  Tensor to_cpu(const Tensor& tensor, bool may_be_plain) {
    if (!on_stand_in(tensor)) {
      if (tensor.defined() && tensor.device().is_cpu()) {
        plain.push_back(tensor);
        if (!may_be_plain) wrong.push_back(tensor);
      }
      return tensor;
    }
    auto storage = tensor.storage();
    auto found = aliases.find(storage.unsafeGetStorageImpl());
    if (found == aliases.end()) {
      auto alias = under(storage, c10::Device(c10::kCPU));
      origins.emplace(alias.unsafeGetStorageImpl(), storage);
      found = aliases.emplace(storage.unsafeGetStorageImpl(), alias).first;
    }
    auto alias = with_storage(tensor, found->second);
    moved.emplace_back(tensor, alias);
    return alias;
  }

  Tensor from_cpu(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto& [argument, alias] : moved)
      if (alias.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return argument;
    for (auto& argument : plain)
      if (argument.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return tensor;
    auto origin = origins.find(tensor.storage().unsafeGetStorageImpl());
    if (origin != origins.end()) return with_storage(tensor, origin->second);
    bool here = target ? target->is_cuda() : !moved.empty();
    return here ? with_storage(tensor, under(tensor.storage(), kStandIn)) : tensor;
  }

  // Arguments that the operation gave another size or memory.
  void write_back() {
    for (auto& [argument, alias] : moved) {
      auto* impl = argument.unsafeGetTensorImpl();
      auto origin = origins.find(alias.storage().unsafeGetStorageImpl());
      bool grown = origin != origins.end() && alias.storage().data() != argument.storage().data();
      if (origin == origins.end() || grown) impl->set_storage_keep_dtype(under(alias.storage(), kStandIn));
      if (!argument.sizes().equals(alias.sizes()) || !argument.strides().equals(alias.strides()) ||
          argument.storage_offset() != alias.storage_offset())
        impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }
};

// What a GPU takes from the CPU too: what it copies, what it indexes by, and single numbers, but none in a row of tensors.
bool may_be_on_cpu(const std::string& operation, const std::string& argument, const Tensor& tensor) {
  static const std::set<std::string> copying = {"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::_foreach_copy_"};
  static const std::set<std::string> joining = {"aten::cat", "aten::stack"};
  if (copying.count(operation) || argument == "indices") return true;
  return tensor.defined() && tensor.dim() == 0 && !joining.count(operation);
}

void report(const std::string& name, const Call& call) {
  pybind11::gil_scoped_acquire lock;
  std::string shapes;
  for (auto& tensor : call.wrong) shapes += (shapes.empty() ? "" : ", ") + c10::str(tensor.sizes());
  pybind11::reinterpret_borrow<pybind11::object>(on_mixed)(name, shapes);
}

template <class Change>
void change_tensors(IValue& value, Change change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const Tensor& tensor : value.toTensorVector()) changed.push_back(change(tensor));
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& tensor : value.toOptionalTensorVector())
      changed.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    value = changed;
  }
}

void compute(const c10::OperatorHandle& operation, Stack* stack) {
  const auto& schema = operation.schema();
  const auto& name = schema.operator_name().name;
  auto first = stack->size() - schema.arguments().size();
  Call call;
  for (size_t i = first; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    const auto& argument = schema.arguments()[i - first];
    if (value.isDevice()) {
      call.target = value.toDevice();
      value = IValue(c10::Device(c10::kCPU));
    } else if (value.isBool() && argument.name() == "pin_memory") {
      value = IValue(false);
    } else {
      change_tensors(value, [&](const Tensor& tensor) {
        return call.to_cpu(tensor, may_be_on_cpu(name, argument.name(), tensor));
      });
    }
  }
  if (!call.moved.empty() && !call.wrong.empty()) report(name, call);
  operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (auto& value : *stack) change_tensors(value, [&](const Tensor& tensor) { return call.from_cpu(tensor); });
  call.write_back();
}

// ------------------------------------------------------------ operations that name memory itself

Tensor& set_storage(Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
                    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (stride.empty())
    impl->set_storage_offset(offset.expect_int()), impl->set_sizes_contiguous(sizes);
  else
    impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return self;
}

Tensor& set_whole_storage(Tensor& self, c10::Storage source) {
  c10::SymInt count(static_cast<int64_t>(source.nbytes() / self.itemsize()));
  return set_storage(self, std::move(source), 0, c10::SymIntArrayRef(&count, 1), {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}

Tensor& set_empty(Tensor& self) {
  auto fresh = at::empty({0}, self.options());
  return set_tensor(self, fresh);
}

// The composite one asks the hardware which kernel to take.
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout,
              bool is_causal, std::optional<double> scale, bool enable_gqa) {
  auto bias = mask;
  if (bias && bias->scalar_type() == at::kBool)
    bias = at::zeros(bias->sizes(), query.options()).masked_fill_(bias->logical_not(), -INFINITY);
  return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, bias, dropout, is_causal, std::nullopt, scale,
                                                            enable_gqa));
}

TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", attend); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  const std::set<std::string> own = {"aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
                                     "aten::set_.source_Tensor", "aten::set_"};
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto full = c10::toString(name);
    if (full.rfind("aten::", 0) != 0 || own.count(full)) continue;
    auto operation = dispatcher.findOp(name);
    if (!operation || !operation->hasSchema()) continue;
    auto has = [&](c10::DispatchKey key) { return operation->hasKernelForDispatchKey(key); };
    bool kernel = has(c10::DispatchKey::CPU) || has(c10::DispatchKey::CompositeExplicitAutograd) ||
                  has(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    if (kernel) m.impl(full.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&compute>());
  }
  m.impl("scaled_dot_product_attention", attend);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_empty);
}

// The storage of a tensor of the stand-in gets another size; what it held stays, as far as there is room.
void resize_storage(const Tensor& tensor, int64_t size) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto fresh = at::empty({size}, at::kByte);
  auto kept = std::min<int64_t>(size, static_cast<int64_t>(storage->nbytes()));
  if (kept) std::memcpy(fresh.data_ptr(), storage->data(), kept);
  auto* owner = new c10::Storage(fresh.storage());
  auto free = [](void* memory) { delete static_cast<c10::Storage*>(memory); };
  storage->set_data_ptr_noswap(c10::DataPtr(fresh.data_ptr(), owner, free, kStandIn));
  storage->set_nbytes(size);
}

// The same values as a tensor of the CPU: for whoever stands outside, as the wires between GPUs do.
Tensor host_view(const Tensor& tensor) { return with_storage(tensor, under(tensor.storage(), c10::Device(c10::kCPU))); }

TORCH_LIBRARY(stand_in, m) {
  m.def("resize_storage", resize_storage);
  m.def("host_view", host_view);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  replace_hooks();
  m.def("when_mixed", [](pybind11::object call) { on_mixed = call.release().ptr(); });
}
