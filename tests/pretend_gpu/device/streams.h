// Streams and what orders them. Kernels run at once, on the CPU, in the thread that enqueues them; what a real device
// would leave unordered is found by vector clocks: a clock per stream, one for the host, joined by events and waits.
#pragma once
#include "report.h"
#include <c10/util/Exception.h>
#include <algorithm>
#include <c10/core/Stream.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

using c10::Device; using c10::DeviceIndex; using c10::DeviceType; using c10::Stream; using c10::StreamId;
constexpr auto CUDA = DeviceType::CUDA;

inline thread_local DeviceIndex current_device = 0;
inline thread_local std::map<DeviceIndex, StreamId> current_streams;

// As many as CUDA_VISIBLE_DEVICES names, else PRETEND_CUDA_DEVICES.
inline int device_count() {
  static const int count = [] {
    if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
      const std::string names(visible);
      if (names.empty() || names == "-1" || names == "NoDevFiles") return 0;
      return int(1 + std::count(names.begin(), names.end(), ','));
    }
    const char* number = std::getenv("PRETEND_CUDA_DEVICES");
    return number ? std::atoi(number) : 1;
  }();
  return count;
}
inline DeviceIndex checked(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "CUDA error: invalid device ordinal");
  return device;
}
inline DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }
inline StreamId current_stream(DeviceIndex device) {
  const auto found = current_streams.find(device);
  return found == current_streams.end() ? 0 : found->second;
}

using StreamKey = int;  // of a stream of a device
inline StreamKey key_of(DeviceIndex device, StreamId stream) { return int(device) * 100000 + int(stream); }
inline StreamKey key_of(const Stream& stream) { return key_of(stream.device_index(), stream.id()); }

using Clock = std::map<StreamKey, uint64_t>;
inline void join(Clock& one, const Clock& other) { for (const auto& [key, at] : other) if (one[key] < at) one[key] = at; }

// Work that a library enqueued on a stream and does in a thread of its own: a broadcast of NCCL's.
struct Ticket { std::atomic<bool> done{false}; };
using Tickets = std::vector<std::shared_ptr<Ticket>>;
inline bool ended(const Tickets& tickets) { return std::all_of(tickets.begin(), tickets.end(), [](const auto& t) { return t->done.load(); }); }
inline void await(const Tickets& tickets) { while (!ended(tickets)) std::this_thread::sleep_for(std::chrono::microseconds(100)); }

// Numbers of threads: std::thread::id is given again when a thread has ended.
inline std::atomic<uint64_t> threads{0};
inline uint64_t this_thread() { static thread_local const uint64_t number = ++threads; return number; }

struct StreamState {
  Clock clock;
  Tickets outside;
  std::deque<std::function<void()>> late;  // copies to and from pinned memory, done when somebody waits for the stream
  std::recursive_mutex copying;            // a second thread that waits must not go on while the first one copies
  uint64_t last_thread = 0;                // the number of the thread that enqueued last
};
inline std::map<StreamKey, StreamState> all_streams;
inline Clock host_clock;
inline StreamId next_stream = 1;

inline StreamState& state_of(StreamKey key) { Locked lock(state_lock); return all_streams[key]; }
inline Tickets unfinished(StreamKey key) {
  Locked lock(state_lock);
  auto& all = all_streams[key].outside;
  std::erase_if(all, [](const auto& ticket) { return ticket->done.load(); });
  return all;
}

inline void do_late_copies(StreamKey key) {
  StreamState& stream = state_of(key);
  // Freed after the mutex: freeing a tensor may need the interpreter's lock, which a thread that waits here may hold.
  std::vector<std::function<void()>> done;
  std::lock_guard copying(stream.copying);
  while (true) {
    {
      Locked lock(state_lock);
      if (stream.late.empty()) return;
      done.push_back(std::move(stream.late.front()));
      stream.late.pop_front();
    }
    done.back()();
  }
}
// Everything enqueued on a stream so far really is done; what the host knows of it does not change.
inline void drain(StreamKey key) {
  await(unfinished(key));
  do_late_copies(key);
}
inline void host_waits_for(StreamKey key) {
  drain(key);
  Locked lock(state_lock);
  join(host_clock, all_streams[key].clock);
}

struct Event {
  Clock at;
  Tickets tickets;
  StreamKey stream = -1;
  std::chrono::steady_clock::time_point when;

  void record(StreamKey key) {
    Locked lock(state_lock);
    stream = key;
    tickets = unfinished(key);
    join(all_streams[key].clock, host_clock);
    at = all_streams[key].clock;
    when = std::chrono::steady_clock::now();
  }
  bool over() const { return ended(tickets); }
  // The stream's later work comes after the event.
  void holds_back(StreamKey key) {
    if (stream < 0) return;
    do_late_copies(stream);
    Locked lock(state_lock);
    join(all_streams[key].clock, at);
    for (const auto& ticket : tickets) if (!ticket->done) all_streams[key].outside.push_back(ticket);
  }
  void host_waits() {
    if (stream < 0) return;
    await(tickets);
    do_late_copies(stream);
    Locked lock(state_lock);
    join(host_clock, at);
  }
};
