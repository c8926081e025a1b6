// A pretended CUDA device for a CPU-only torch, in one translation unit: torch's headers take most of the build. Where it
// is registered, and the C functions by which Python asks what it found.
#include "operators.h"

namespace {
using at::CUDAHooksArgs;
using at::CUDAHooksInterface;
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(Hooks)
const auto registered_again = [] {  // by the name under which torch looks for it
  CUDAHooksRegistry()->Register("CUDAHooks", [](CUDAHooksArgs args) -> std::unique_ptr<CUDAHooksInterface> { return std::make_unique<Hooks>(args); });
  return true;
}();
const auto started = [] {
  c10::impl::registerDeviceGuard(CUDA, new Guard);
  c10::SetAllocator(CUDA, &device_allocator, 255);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  return true;
}();
}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", TORCH_FN(make_empty));
  library.impl("empty_strided", TORCH_FN(make_strided));
  library.impl("copy_", TORCH_FN(copy));
  library.impl("_local_scalar_dense", TORCH_FN(number));
  library.impl("record_stream", TORCH_FN(record_stream));
  library.impl("as_strided", TORCH_FN(as_strided));
  library.impl("view", TORCH_FN(view));
  library.impl("_reshape_alias", TORCH_FN(reshape_alias));
  library.impl("unfold", TORCH_FN(unfold));
  library.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage));
  library.impl("resize_", TORCH_FN(resized));
  // As a whole: on a CUDA device torch would cut depthwise ones into kernels that the CPU has not got.
  for (const char* whole : {"convolution", "convolution_backward"}) library.impl(whole, torch::CppFunction::makeFromBoxedFunction<&any_operator>());
}

static const char* lines(const std::set<std::string>& all) {  // valid until the thread asks again
  static thread_local std::string text;
  text.clear();
  for (const auto& line : all) text += line + "\n";
  return text.c_str();
}

extern "C" {
int pretend_device_count() { return device_count(); }
int pretend_current_device() { return current_device; }
void pretend_tell(void (*told)(const char*, const char*)) { report.told = told; }
const char* pretend_operators() { Locked lock(state_lock); return lines(report.operators); }
const char* pretend_nondeterministic() { Locked lock(state_lock); return lines(report.nondeterministic); }
void pretend_forget_operators() { Locked lock(state_lock); report.operators.clear(); report.nondeterministic.clear(); }
void pretend_varies(const char* name, const char* condition) { Locked lock(state_lock); nondeterministic_operators[name] = condition; }

unsigned long pretend_live_bytes(int device) { Locked lock(state_lock); return live_bytes[device]; }
unsigned long pretend_peak_bytes(int device) { Locked lock(state_lock); return peak_bytes[device]; }
void pretend_reset_peak(int device) { Locked lock(state_lock); peak_bytes[device] = live_bytes[device]; }
void pretend_resize(void* storage, int device, unsigned long bytes) { resize_storage(*static_cast<c10::StorageImpl*>(storage), DeviceIndex(device), bytes); }

// For what stands in for a library that enqueues work of its own on a stream and does it in another thread.
void pretend_touch(const char* what, int device, long stream, unsigned long pointer, unsigned long bytes, int write) {
  Operation(what, key_of(DeviceIndex(device), stream), true).touch(pointer, pointer + bytes, write);
}
void* pretend_begin(int device, long stream) {
  const StreamKey key = key_of(DeviceIndex(device), stream);
  do_late_copies(key);
  const auto ticket = std::make_shared<Ticket>();
  Locked lock(state_lock);
  all_streams[key].outside.push_back(ticket);
  return new std::shared_ptr<Ticket>(ticket);
}
// A library says that its kernels on a stream are over: ncclCommAbort returns no earlier.
void pretend_ended(int device, long stream) {
  Locked lock(state_lock);
  join(host_clock, all_streams[key_of(DeviceIndex(device), stream)].clock);
}
void pretend_end(void* begun) {
  auto* ticket = static_cast<std::shared_ptr<Ticket>*>(begun);
  (*ticket)->done = true;
  delete ticket;
}
}
