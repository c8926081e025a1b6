// What the pretended device found: races, waits of the host, operators. Python adds where in the program it happened.
#pragma once
#include <map>
#include <mutex>
#include <set>
#include <string>

// One lock for all state of the device. Never held while Python is told something: that needs the interpreter's lock.
inline std::recursive_mutex state_lock;
using Locked = std::lock_guard<std::recursive_mutex>;

struct Report {
  std::set<std::string> operators;          // dispatched to the device: "aten::mm"
  std::set<std::string> nondeterministic;   // of these, what CUDA can compute only with varying bits
  void (*told)(const char* kind, const char* text) = nullptr;
  void tell(const char* kind, const std::string& text) const { if (told) told(kind, text.c_str()); }
};
inline Report report;
