// The three interfaces by which torch asks for a device: the guard (devices, streams, events), the hooks, generators.
#pragma once
#include "memory.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static Stream made(DeviceIndex device, StreamId id) { return Stream(Stream::UNSAFE, Device(CUDA, device), id); }
  DeviceType type() const override { return CUDA; }
  DeviceIndex deviceCount() const noexcept override { return DeviceIndex(device_count()); }
  Device getDevice() const override { return Device(CUDA, current_device); }
  void setDevice(Device device) const override { if (device.has_index()) current_device = checked(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { if (device.has_index()) current_device = device.index(); }
  Device exchangeDevice(Device device) const override { const Device was = getDevice(); setDevice(device); return was; }

  Stream getStream(Device device) const override { return made(index_of(device), current_stream(index_of(device))); }
  Stream getDefaultStream(Device device) const override { return made(index_of(device), 0); }
  Stream getNewStream(Device device, int = 0) const override { Locked lock(state_lock); return made(index_of(device), next_stream++); }
  Stream getStreamFromGlobalPool(Device device, bool = false) const override { return getNewStream(device); }
  Stream exchangeStream(Stream stream) const override {
    const Stream was = getStream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return was;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return (void*)uintptr_t(stream.id()); }
  bool queryStream(const Stream& stream) const override {
    if (!unfinished(key_of(stream)).empty()) return false;
    host_waits_for(key_of(stream));
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    host_waits_for(key_of(stream));
    report.tell("sync", "Stream.synchronize");
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    std::vector<StreamKey> keys;
    { Locked lock(state_lock); for (auto& [key, _] : all_streams) if (key / 100000 == device) keys.push_back(key); }
    for (const StreamKey key : keys) host_waits_for(key);
    report.tell("sync", "cuda.synchronize");
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record(key_of(stream));
  }
  void block(void* event, const Stream& stream) const override { if (event) static_cast<Event*>(event)->holds_back(key_of(stream)); }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    if (!static_cast<Event*>(event)->over()) return false;
    static_cast<Event*>(event)->host_waits();
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    static_cast<Event*>(event)->host_waits();
    report.tell("sync", "Event.synchronize");
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    const std::chrono::duration<double, std::milli> took = static_cast<Event*>(end)->when - static_cast<Event*>(begin)->when;
    return took.count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override { record_on(pointer.get(), key_of(stream)); }
};

struct Generator final : c10::GeneratorImpl {
  at::Generator inner;  // draws the numbers; not those that CUDA would draw
  Generator(DeviceIndex device, at::Generator inner) : GeneratorImpl(Device(CUDA, device), c10::DispatchKeySet(c10::DispatchKey::CUDA)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), inner.clone()); }
};

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return device_count() > 0; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DeviceIndex(device_count()); }
  int getNumGPUs() const override { return device_count(); }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = checked(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { const auto was = ::current_device; setCurrentDevice(device); return was; }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  void deviceSynchronize(DeviceIndex device) const override { Guard().synchronizeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  Device getDeviceFromPtr(void* pointer) const override {
    Locked lock(state_lock);
    const Block* block = block_of(pointer);
    return Device(CUDA, block ? block->device : 0);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? ::current_device : device, at::detail::createCPUGenerator());
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    static std::map<DeviceIndex, at::Generator> made;
    Locked lock(state_lock);
    at::Generator& generator = made[device < 0 ? ::current_device : device];
    if (!generator.defined()) generator = getNewGenerator(device);
    return generator;
  }
};
