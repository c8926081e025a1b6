// The device's memory: blocks of host memory with who touched which of their bytes, used again in the order of the
// stream they were taken on, and finite (PRETEND_CUDA_GIB); and pinned host memory.
#pragma once
#include "streams.h"
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <cstring>
#include <sstream>

constexpr int MAX_DEVICES = 64;
constexpr size_t GRAIN = 512;     // bytes, as CUDA's caching allocator rounds
constexpr int GARBAGE = 0xCB;     // what memory holds that nobody wrote

struct Access { StreamKey stream; uint64_t at; std::string what; uintptr_t begin, end; };
using Accesses = std::vector<Access>;
struct Block {
  size_t size; DeviceIndex device; StreamKey stream;
  Accesses reads, writes;
  std::set<StreamKey> recorded;   // Tensor.record_stream
};
inline std::map<uintptr_t, Block> blocks;
inline std::map<std::tuple<DeviceIndex, StreamKey, size_t>, std::vector<uintptr_t>> spare_blocks;
inline size_t live_bytes[MAX_DEVICES] = {}, peak_bytes[MAX_DEVICES] = {};

inline size_t capacity() {
  static const size_t bytes = [] {
    const char* gib = std::getenv("PRETEND_CUDA_GIB");
    return gib ? size_t(std::atof(gib) * (1ull << 30)) : size_t(-1) / 2;
  }();
  return bytes;
}
inline Block* block_of(const void* pointer) {
  auto found = blocks.upper_bound(uintptr_t(pointer));
  if (found == blocks.begin()) return nullptr;
  --found;
  return uintptr_t(pointer) < found->first + found->second.size ? &found->second : nullptr;
}
inline void record_on(const void* pointer, StreamKey key) {
  Locked lock(state_lock);
  if (Block* block = block_of(pointer)) block->recorded.insert(key);
}

// The memory can be taken again at once, by the stream it belongs to, which is all that CUDA's allocator orders. Only
// streams that were recorded are waited for, here by forgetting what they did.
inline void release(void* context) {
  Locked lock(state_lock);
  const auto found = blocks.find(uintptr_t(context));
  if (found == blocks.end()) return;
  Block& block = found->second;
  live_bytes[block.device] -= block.size;
  const auto recorded = [&](const Access& access) { return block.recorded.count(access.stream) > 0; };
  std::erase_if(block.reads, recorded);
  std::erase_if(block.writes, recorded);
  block.recorded.clear();
  spare_blocks[{block.device, block.stream, block.size}].push_back(found->first);
}

inline bool set_to_expand() {
  const char* settings = std::getenv("PYTORCH_ALLOC_CONF");
  return settings && std::strstr(settings, "expandable_segments:True");
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return on(current_device, bytes); }
  static c10::DataPtr on(DeviceIndex index, size_t bytes) {
    const Device device(CUDA, index);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    TORCH_CHECK(!(std::getenv("PRETEND_NO_MAPPING") && set_to_expand()), "CUDA driver error: operation not supported");
    Locked lock(state_lock);
    const size_t size = (bytes + GRAIN - 1) / GRAIN * GRAIN;
    const StreamKey key = key_of(index, current_stream(index));
    TORCH_CHECK_WITH(OutOfMemoryError, live_bytes[index] + size <= capacity(), "CUDA out of memory (pretended). Tried to allocate ",
        size >> 20, " MiB; ", live_bytes[index] >> 20, " MiB of ", capacity() >> 20, " MiB are in use.");
    live_bytes[index] += size;
    peak_bytes[index] = std::max(peak_bytes[index], live_bytes[index]);
    auto& spare = spare_blocks[{index, key, size}];
    uintptr_t base;
    if (spare.empty()) {
      base = uintptr_t(std::aligned_alloc(GRAIN, size));
      blocks[base] = Block{size, index, key, {}, {}, {}};
    } else {
      base = spare.back();
      spare.pop_back();
    }
    std::memset((void*)base, GARBAGE, size);
    return {(void*)base, (void*)base, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline DeviceAllocator device_allocator;

inline std::map<uintptr_t, size_t> pinned_memory;
struct PinnedAllocator final : c10::Allocator {
  static constexpr size_t PAGE = 4096;
  c10::DataPtr allocate(size_t bytes) override {
    void* base = std::aligned_alloc(PAGE, (bytes / PAGE + 1) * PAGE);
    Locked lock(state_lock);
    pinned_memory[uintptr_t(base)] = bytes;
    return {base, base, &drop, Device(DeviceType::CPU)};
  }
  static void drop(void* base) {
    { Locked lock(state_lock); pinned_memory.erase(uintptr_t(base)); }
    std::free(base);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedAllocator pinned_allocator;
inline bool is_pinned(const void* pointer) {
  Locked lock(state_lock);
  auto found = pinned_memory.upper_bound(uintptr_t(pointer));
  if (found == pinned_memory.begin()) return false;
  --found;
  return uintptr_t(pointer) < found->first + found->second;
}

// One kernel, copy or collective on a stream: what it reads and writes is compared with what other streams did.
struct Operation {
  std::string name;
  StreamKey stream;
  uint64_t at;
  bool behind_another_thread;  // a wait for it waits for work that another thread enqueued

  // `enqueued`: somebody else does the work, when its turn has come.
  Operation(std::string what, StreamKey key, bool enqueued = false) : name(std::move(what)), stream(key) {
    if (!enqueued) drain(key);
    Locked lock(state_lock);
    StreamState& state = all_streams[key];
    join(state.clock, host_clock);
    const bool waited = host_clock[key] >= state.clock[key];  // by the host, for the stream or an event behind its work
    at = ++state.clock[key];
    behind_another_thread = !waited && state.last_thread != this_thread();
    state.last_thread = this_thread();
  }
  Operation(std::string what, DeviceIndex device) : Operation(std::move(what), key_of(device, current_stream(device))) {}

  void touch(const at::Tensor& tensor, bool write) {
    if (!tensor.defined() || tensor.device().type() != CUDA || !tensor.has_storage() || tensor.numel() == 0) return;
    const auto begin = uintptr_t(tensor.const_data_ptr());
    touch(begin, begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize()), write);
  }
  void touch(uintptr_t begin, uintptr_t end, bool write) {
    std::vector<std::string> found;
    {
      Locked lock(state_lock);
      if (Block* block = block_of((void*)begin)) found = look(*block, begin, end, write);
    }
    for (const auto& text : found) report.tell("race", text);
  }
  // The host waits for everything enqueued on the stream.
  void host_waits(const std::string& why) const {
    host_waits_for(stream);
    if (behind_another_thread) report.tell("behind another thread", why);
    report.tell("sync", why);
  }

 private:
  std::vector<std::string> look(Block& block, uintptr_t begin, uintptr_t end, bool write) {
    Clock& clock = all_streams[stream].clock;
    std::vector<std::string> found;
    const auto compare = [&](const Accesses& accesses, const char* did) {
      for (const auto& other : accesses) {
        const bool overlaps = other.begin < end && begin < other.end;
        if (!overlaps || other.stream == stream || clock[other.stream] >= other.at) continue;
        std::ostringstream text;
        text << name << (write ? " writes" : " reads") << " on stream " << stream << " what " << other.what << did
             << " on stream " << other.stream << ", unordered (" << end - begin << " bytes)";
        found.push_back(text.str());
      }
    };
    compare(block.writes, " wrote");
    if (write) compare(block.reads, " read");
    Accesses& own = write ? block.writes : block.reads;
    std::erase_if(own, [&](const Access& other) {
      return begin <= other.begin && other.end <= end && (other.stream == stream || clock[other.stream] >= other.at);
    });
    own.push_back({stream, at, name, begin, end});
    return found;
  }
};
