// A pretended libnccl.so.2: broadcasts between processes of one host through shared memory, for code that calls NCCL
// itself on pretended GPUs. It has NCCL's manners: joining waits for every rank without a time-out, operations run in
// order on their stream and end late, a dead peer is waited for until the communicator is aborted, two ranks on one
// device are refused, a non-blocking communicator says "in progress" until it is not.
// PRETEND_NCCL_SETUP: seconds that joining takes. PRETEND_NCCL_FAIL=n: the n-th broadcast ends in ncclRemoteError.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <dlfcn.h>
#include <fcntl.h>
#include <functional>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

enum ncclResult_t { Success, UnhandledCuda, System, Internal, InvalidArgument, InvalidUsage, RemoteError, InProgress };
struct ncclUniqueId { char internal[128]; };
struct ncclConfig_t { size_t size; unsigned magic, version; int blocking; };  // and more, which is not looked at

constexpr size_t CHUNK = 1 << 20;
constexpr int MAX_RANKS = 64;
struct Shared {  // of all ranks; zeros at first
  std::atomic<int> joined;
  char bus[MAX_RANKS][64];
  std::atomic<uint64_t> written, read[MAX_RANKS];  // numbers of chunks
  unsigned char data[CHUNK];
};

static void nap() { std::this_thread::sleep_for(std::chrono::microseconds(50)); }

// The pretended device's functions, which are there where the process has loaded it.
template <class F> static F device_function(const char* name) { return (F)dlsym(RTLD_DEFAULT, name); }
static int current_device() {
  static const auto ask = device_function<int (*)()>("pretend_current_device");
  return ask ? ask() : 0;
}
static void touch(int device, void* stream, const void* pointer, size_t bytes, bool write) {
  static const auto tell = device_function<void (*)(const char*, int, long, unsigned long, unsigned long, int)>("pretend_touch");
  if (tell) tell("ncclBroadcast", device, (long)stream, (unsigned long)pointer, bytes, write);
}
static void* begin(int device, void* stream) {
  static const auto tell = device_function<void* (*)(int, long)>("pretend_begin");
  return tell ? tell(device, (long)stream) : nullptr;
}
static void end(void* ticket) {
  static const auto tell = device_function<void (*)(void*)>("pretend_end");
  if (tell && ticket) tell(ticket);
}
static void kernels_ended(int device, void* stream) {
  static const auto tell = device_function<void (*)(int, long)>("pretend_ended");
  if (tell) tell(device, (long)stream);
}
static std::string bus_of(int device) {  // which GPU of which host the process's n-th one is
  const char* host = std::getenv("NCCL_HOSTID");
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  std::stringstream names(visible ? visible : "");
  std::string name = std::to_string(device);
  if (visible) for (int i = 0; i <= device && std::getline(names, name, ','); i++) {}
  return std::string(host ? host : "") + "/" + name;
}

struct ncclComm {
  const int rank, size, device = current_device();
  const std::string name;
  Shared* shared = nullptr;
  std::atomic<bool> aborted{false};
  std::atomic<int> state{InProgress};  // what ncclCommGetAsyncError tells
  bool blocking = true;
  int broadcasts = 0;
  std::set<void*> streams;  // that have its kernels

  ncclComm(int rank, int size, const ncclUniqueId& id) : rank(rank), size(size), name(id.internal) {}

  void join() {
    if (const char* seconds = std::getenv("PRETEND_NCCL_SETUP")) std::this_thread::sleep_for(std::chrono::duration<double>(std::atof(seconds)));
    const int file = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0 || ftruncate(file, sizeof(Shared))) { state = System; return; }
    shared = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    std::snprintf(shared->bus[rank], sizeof shared->bus[rank], "%s", bus_of(device).c_str());
    shared->joined++;
    while (shared->joined < size && !aborted) nap();
    if (rank == 0) shm_unlink(name.c_str());
    if (aborted) return;
    bool duplicate = false;
    for (int i = 0; i < size; i++) for (int j = 0; j < i; j++) duplicate |= !std::strcmp(shared->bus[i], shared->bus[j]);
    state = duplicate ? InvalidUsage : Success;
  }
  void start(std::function<void()> first) { worker = std::thread([this, first] { if (first) first(); serve(); }); }
  void enqueue(std::function<void()> work) {
    { std::lock_guard lock(mutex); queue.push_back(std::move(work)); }
    changed.notify_one();
  }
  void stop() {
    { std::lock_guard lock(mutex); ended = true; }
    changed.notify_one();
    if (worker.joinable()) worker.join();  // a destroy waits for what is under way
  }
  void move(const char* from, char* to, size_t bytes, int root) {
    for (size_t at = 0; at < bytes && !aborted; at += CHUNK) {
      const size_t part = std::min(CHUNK, bytes - at);
      const uint64_t number = ++chunks;
      if (rank == root) {
        std::memcpy(shared->data, from + at, part);
        shared->written = number;
        for (int i = 0; i < size; i++) while (i != root && shared->read[i] < number && !aborted) nap();
      } else {
        while (shared->written < number && !aborted) nap();
        if (aborted) return;
        std::memcpy(to + at, shared->data, part);
        shared->read[rank] = number;
      }
    }
  }

 private:
  uint64_t chunks = 0;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  std::thread worker;
  bool ended = false;
  void serve() {
    while (true) {
      std::function<void()> work;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return ended || !queue.empty(); });
        if (queue.empty()) return;
        work = std::move(queue.front());
        queue.pop_front();
      }
      work();
    }
  }
};
using ncclComm_t = ncclComm*;

extern "C" {
ncclResult_t ncclGetVersion(int* version) { *version = 22707; return Success; }
const char* ncclGetErrorString(ncclResult_t result) {
  static const char* texts[] = {"no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)", "unhandled system error (run with NCCL_DEBUG=INFO for details)",
      "internal error - please report this issue to the NCCL developers", "invalid argument (run with NCCL_DEBUG=WARN for details)", "invalid usage (run with NCCL_DEBUG=WARN for details)",
      "remote process exited or there was a network error", "NCCL operation in progress"};
  return result >= Success && result <= InProgress ? texts[result] : "unknown result code";
}
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::memset(id, 0, sizeof *id);
  std::random_device random;
  std::snprintf(id->internal, sizeof id->internal, "/pretend_nccl_%08x%08x", random(), random());
  id->internal[100] = (char)0xF3;  // as the real one, not text
  return Success;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (rank < 0 || rank >= size || size > MAX_RANKS) return InvalidArgument;
  auto* comm = new ncclComm(rank, size, id);
  *made = comm;
  if (config && config->blocking == 0) {
    comm->blocking = false;
    comm->start([comm] { comm->join(); });
    return InProgress;
  }
  comm->join();
  comm->start(nullptr);
  return ncclResult_t(comm->state.load());
}
ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) { return ncclCommInitRankConfig(made, size, id, rank, nullptr); }
ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, int type, int root, ncclComm_t comm, void* stream) {
  static const int bytes_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  if (!comm || comm->aborted || comm->state != Success) return InvalidUsage;
  if (type < 0 || type > 9) return InvalidArgument;
  const size_t bytes = count * bytes_of[type];
  touch(comm->device, stream, comm->rank == root ? from : to, bytes, comm->rank != root);
  void* ticket = begin(comm->device, stream);
  comm->streams.insert(stream);
  const char* fails = std::getenv("PRETEND_NCCL_FAIL");
  const bool failing = fails && ++comm->broadcasts == std::atoi(fails);
  if (!comm->blocking) comm->state = InProgress;
  comm->enqueue([=] {
    if (failing) {
      comm->state = RemoteError;
      while (!comm->aborted) nap();
    } else {
      if (!comm->blocking) comm->state = Success;
      comm->move((const char*)from, (char*)to, bytes, root);
    }
    end(ticket);
  });
  return comm->blocking ? Success : InProgress;
}
ncclResult_t ncclBcast(void* buffer, size_t count, int type, int root, ncclComm_t comm, void* stream) { return ncclBroadcast(buffer, buffer, count, type, root, comm, stream); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  if (!comm) return InvalidArgument;
  *error = ncclResult_t(comm->state.load());
  return Success;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  if (!comm) return Success;
  comm->stop();
  for (void* stream : comm->streams) kernels_ended(comm->device, stream);
  return Success;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  if (!comm) return Success;
  comm->aborted = true;
  return ncclCommDestroy(comm);
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return Success; }
ncclResult_t ncclCommCount(ncclComm_t comm, int* count) { *count = comm->size; return Success; }
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) { *rank = comm->rank; return Success; }
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) { *device = comm->device; return Success; }
ncclResult_t ncclGroupStart() { return Success; }
ncclResult_t ncclGroupEnd() { return Success; }
// A binding that looks its functions up when it is loaded finds these, and an error where it calls one.
#define ABSENT(name) ncclResult_t name() { return Internal; }
ABSENT(ncclAllGather) ABSENT(ncclAllReduce) ABSENT(ncclCommInitAll) ABSENT(ncclCommSplit) ABSENT(ncclRecv) ABSENT(ncclSend)
ABSENT(ncclReduce) ABSENT(ncclReduceScatter)
}
