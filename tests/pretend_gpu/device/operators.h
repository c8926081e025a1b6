// Operators on the device's tensors: the CPU's kernels compute them on host tensors that share their memory.
#pragma once
#include "runtime.h"
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>
#include <unordered_map>

// Operators by name, with the condition under which they vary: see nondeterministic.py.
inline std::map<std::string, std::string> nondeterministic_operators;

const at::Tensor& resized(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>);

// Host tensors that are the device's tensors of one operation, and the way back for what the operation returns.
class Aliases {
 public:
  std::vector<std::pair<at::Tensor, at::Tensor>> made;  // (on the device, on the host)

  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != CUDA) return tensor;
    auto alias = at::detail::make_tensor<c10::TensorImpl>(host_storage(tensor), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) alias._set_conj(true);
    if (tensor.is_neg()) alias._set_neg(true);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    made.emplace_back(tensor, alias);
    return alias;
  }
  // An argument itself, a view of one, or a new tensor on the device.
  at::Tensor back(const at::Tensor& result, DeviceIndex device, Operation& operation) {
    if (!result.defined() || result.device().type() != DeviceType::CPU) return result;
    for (auto& [own, alias] : made) {
      if (alias.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return own;
      const void* data = result.has_storage() ? result.storage().data() : nullptr;
      if (data && alias.storage().data() == data) {
        auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(own.storage()), c10::DispatchKeySet(c10::DispatchKey::CUDA), result.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
        if (result.is_conj()) view._set_conj(true);
        return view;
      }
    }
    auto fresh = at::empty_strided(result.sizes(), result.strides(), result.options().device(Device(CUDA, device)));
    if (fresh.nbytes()) {
      const size_t bytes = at::detail::computeStorageNbytes(result.sizes(), result.strides(), result.itemsize());
      std::memcpy(fresh.mutable_data_ptr(), result.const_data_ptr(), bytes);
    }
    if (result.is_conj()) fresh._set_conj(true);
    operation.touch(fresh, true);
    return fresh;
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages;

  c10::Storage host_storage(const at::Tensor& tensor) {
    auto* own = tensor.storage().unsafeGetStorageImpl();
    const auto found = storages.find(own);
    if (found != storages.end()) return found->second;
    const auto forget = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
    c10::DataPtr view(own->mutable_data(), new c10::Storage(tensor.storage()), forget, Device(DeviceType::CPU));
    c10::Storage storage(c10::Storage::use_byte_size_t(), own->nbytes(), std::move(view), c10::GetCPUAllocator(), true);
    return storages.emplace(own, std::move(storage)).first->second;
  }
};

// A call of any operator: its arguments lie on the stack, its results replace them.
class Call {
 public:
  Call(const c10::OperatorHandle& handle, torch::jit::Stack* stack)
      : handle(handle), schema(handle.schema()), name(schema.name()), stack(stack), first(stack->size() - schema.arguments().size()) {}

  void run() {
    sort_arguments();
    const DeviceIndex device = on_device.empty() ? current_device : on_device[0].device().index();
    check_devices(device);
    check_determinism();
    Operation operation(name, device);
    each_tensor([&](size_t i, const at::Tensor& tensor) {
      const auto* alias = schema.arguments()[i].alias_info();
      const bool written = alias && alias->isWrite();
      if (written) operation.touch(tensor, true);
      operation.touch(tensor, false);
    });
    replace_arguments();
    handle.callBoxed(stack);
    keep_grown_outputs(operation);
    return_results(device, operation);
    if (waits()) operation.host_waits(name);
  }

 private:
  const c10::OperatorHandle& handle;
  const c10::FunctionSchema& schema;
  const std::string name;
  torch::jit::Stack* stack;
  const size_t first;
  std::vector<at::Tensor> on_device, on_host;  // but numbers: tensors without dimensions, which CUDA's kernels take as such
  bool returns_a_number = false, chooses_by_mask = false;
  Aliases aliases;

  void each_tensor(const std::function<void(size_t, const at::Tensor&)>& visit) {
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      const auto& value = (*stack)[first + i];
      if (value.isTensor()) visit(i, value.toTensor());
      else if (value.isTensorList()) for (const at::Tensor& tensor : value.toTensorVector()) visit(i, tensor);
      else if (value.isOptionalTensorList()) {
        for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) if (tensor) visit(i, *tensor);
      }
    }
  }
  // Indices may lie on the host, which costs a copy; so does a mask, whose elements the host has to count.
  bool indexes() const {
    static const std::set<std::string> names{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};
    return names.count(name) > 0;
  }
  void sort_arguments() {
    each_tensor([&](size_t i, const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (i > 0 && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte)) chooses_by_mask = indexes();
      if (tensor.device().type() == CUDA) on_device.push_back(tensor);
      else if (tensor.device().type() == DeviceType::CPU && tensor.dim() > 0) on_host.push_back(tensor);
    });
  }
  void check_devices(DeviceIndex device) const {
    if (on_device.empty()) return;
    const auto refuse = [&](const Device& other) {
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(device), " and ", other, "! (", name, ")");
    };
    if (!on_host.empty() && !indexes()) refuse(on_host[0].device());
    for (const auto& tensor : on_device) if (tensor.device().index() != device && tensor.dim() > 0) refuse(tensor.device());
  }
  void check_determinism() const {
    bool varies = false;
    {
      Locked lock(state_lock);
      report.operators.insert(name);
      const auto found = nondeterministic_operators.find(name);
      varies = found != nondeterministic_operators.end() && holds(found->second);
      if (varies) report.nondeterministic.insert(name);
    }
    if (varies) at::globalContext().alertNotDeterministic(name);
  }
  bool holds(const std::string& condition) const {
    if (condition == "floating") return !on_device.empty() && on_device[0].is_floating_point();
    if (condition == "weights") return on_device.size() > 1;
    if (condition == "product") return std::any_of(stack->begin() + first, stack->end(), [](const auto& value) { return value.isString() && value.toStringRef() == "prod"; });
    return true;
  }
  void replace_arguments() {
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      auto& value = (*stack)[first + i];
      if (value.isTensor()) value = aliases.of(value.toTensor());
      else if (value.isTensorList()) {
        auto all = value.toTensorVector();
        for (auto& tensor : all) tensor = aliases.of(tensor);
        value = all;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> all;
        for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) all.push_back(tensor ? std::optional(aliases.of(*tensor)) : tensor);
        value = all;
      } else if (value.isDevice() && value.toDevice().type() == CUDA) value = Device(DeviceType::CPU);
      else if (value.isGenerator() && value.toGenerator().defined()) value = host_generator(value.toGenerator());
    }
  }
  at::Generator host_generator(const at::Generator& generator) const {
    if (generator.device().type() == CUDA) return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
    TORCH_CHECK(on_device.empty(), "Expected a 'cuda' device type for generator but found 'cpu'");
    return generator;
  }
  void keep_grown_outputs(Operation& operation) {
    for (auto& [own, alias] : aliases.made) {
      if (own.sizes() == alias.sizes()) continue;
      resized(own, alias.sizes(), std::nullopt);
      if (alias.nbytes()) std::memcpy(own.mutable_data_ptr(), alias.const_data_ptr(), alias.nbytes());
      operation.touch(own, true);
    }
  }
  void return_results(DeviceIndex device, Operation& operation) {
    for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
      auto& value = (*stack)[i];
      if (value.isTensor()) value = aliases.back(value.toTensor(), device, operation);
      else if (value.isTensorList()) {
        auto all = value.toTensorVector();
        for (auto& tensor : all) tensor = aliases.back(tensor, device, operation);
        value = all;
      } else if (value.isScalar() || value.isBool()) returns_a_number = true;
    }
  }
  bool waits() const {
    static const std::set<std::string> sized_by_values{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::bincount"};
    return returns_a_number || sized_by_values.count(name) > 0 || (indexes() && !on_host.empty()) || chooses_by_mask;
  }
};
inline void any_operator(const c10::OperatorHandle& handle, torch::jit::Stack* stack) { Call(handle, stack).run(); }

// ---- operators that belong to the device: memory, copies, views --------------------------------------------------------
struct OnDevice {  // makes a device the current one for a moment
  const DeviceIndex was = current_device;
  explicit OnDevice(std::optional<Device> device) { if (device && device->has_index()) current_device = checked(device->index()); }
  ~OnDevice() { current_device = was; }
};
inline at::Tensor make_empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice here(device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}
inline at::Tensor make_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const OnDevice here(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}
// A copy to another device is made on the source's stream; the target's stream is held back before and after it.
inline void order(const at::Tensor& first, const at::Tensor& then) {
  const DeviceIndex one = first.device().index(), other = then.device().index();
  if (one == other) return;
  Event event;
  event.record(key_of(one, current_stream(one)));
  event.holds_back(key_of(other, current_stream(other)));
}
inline at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  const bool to = self.device().type() == CUDA, from = source.device().type() == CUDA;
  if (to && from) order(self, source);
  const std::string name = to && from ? "copy_ (on the device)" : to ? "copy_ (to the device)" : "copy_ (to the host)";
  Operation operation(name, from ? source.device().index() : self.device().index());
  operation.touch(source, false);
  operation.touch(self, true);
  const auto aliases = std::make_shared<Aliases>();
  at::Tensor target = aliases->of(self), origin = aliases->of(source);
  auto work = [target, origin, aliases]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(origin);
  };
  const at::Tensor& host = to ? source : self;
  if (to && from) {
    work();
    order(source, self);
  } else if (non_blocking && is_pinned(host.const_data_ptr()) && self.scalar_type() == source.scalar_type()) {
    Locked lock(state_lock);
    all_streams[operation.stream].late.push_back(work);
  } else {
    work();
    operation.host_waits(non_blocking ? name + ", pageable memory" : name);
  }
  return self;
}
inline at::Scalar number(const at::Tensor& self) {
  Operation operation("item", self.device().index());
  operation.touch(self, false);
  operation.host_waits("item");
  Aliases aliases;
  return at::_local_scalar_dense(aliases.of(self));
}
inline void record_stream(at::Tensor& self, Stream stream) { record_on(self.storage().data(), key_of(stream)); }
inline at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) { return at::native::as_strided_tensorimpl(self, size, stride, offset); }
inline at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
inline at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) { return at::native::_reshape_alias(self, size, stride); }
inline at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(self, dim, size, step); }
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
inline at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  at::native::checkSetStorage(self, std::move(source), offset, size, stride);
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}
inline void resize_storage(c10::StorageImpl& storage, DeviceIndex device, size_t bytes) {
  auto fresh = DeviceAllocator::on(device, bytes);
  if (bytes && storage.nbytes()) std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}
inline const at::Tensor& resized(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  if (self.storage().nbytes() < bytes) resize_storage(*self.storage().unsafeGetStorageImpl(), self.device().index(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
// scaled_dot_product_attention is computed as plain products (SDPBackend::math), which says nothing of CUDA's kernels:
// those of the backward pass give varying bits exactly where warn_only is set.
inline int64_t choose_attention(const at::Tensor& query, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>& mask, double, bool, std::optional<double>, bool) {
  Locked lock(state_lock);
  const std::string name = "aten::scaled_dot_product_attention";
  report.operators.insert(mask && mask->defined() ? name + " with a mask" : name);
  const auto& context = at::globalContext();
  const bool deterministic = context.deterministicAlgorithms() && !context.deterministicAlgorithmsWarnOnly();
  if (query.requires_grad() && at::GradMode::is_enabled() && !deterministic) report.nondeterministic.insert(name + " (backward)");
  return 0;
}
