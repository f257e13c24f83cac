#include "testing/device/order_checker.h"

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace testdevice {
namespace {

constexpr size_t kMostFaults = 100;

std::shared_ptr<const std::string> Shared(std::string text) {
  return std::make_shared<const std::string>(std::move(text));
}

}  // namespace

int OrderChecker::AddStream(std::string name, int device) {
  absl::MutexLock lock(&mutex_);
  streams_.push_back({std::move(name), device, Clock()});
  return static_cast<int>(streams_.size()) - 1;
}

Clock OrderChecker::Record(int stream) {
  absl::MutexLock lock(&mutex_);
  Clock clock = Of(stream).clock;
  clock.Join(Host());
  return clock;
}

void OrderChecker::Block(int stream, const Clock& event) {
  absl::MutexLock lock(&mutex_);
  Clock& clock = streams_[static_cast<size_t>(stream)].clock;
  clock.Join(event);
  // It counts as a task: what was recorded before it does not wait for `event`.
  clock.Set(stream, clock.of(stream) + 1);
}

void OrderChecker::HostWait(const Clock& event) {
  absl::MutexLock lock(&mutex_);
  Host().Join(event);
}

// ---- memory

void OrderChecker::Allocate(int stream, int device, uintptr_t begin,
                            int64_t bytes, const std::string& maker) {
  absl::MutexLock lock(&mutex_);
  CheckFreedTo(stream);
  Span all;
  all.end = begin + static_cast<uintptr_t>(bytes);
  all.write = {Shared("what used this memory before"), stream,
               Of(stream).clock.of(stream)};
  Memory memory{begin, all.end, stream, device, ++blocks_, maker, {}, {}};
  memory.spans.emplace(begin, std::move(all));
  memory_[begin] = std::move(memory);
}

void OrderChecker::AllocateOnHost(uintptr_t begin, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  Span all;
  all.end = begin + static_cast<uintptr_t>(bytes);
  Memory memory{begin, all.end, -1, -1, ++blocks_, "the host", {}, {}};
  memory.spans.emplace(begin, std::move(all));
  memory_[begin] = std::move(memory);
}

void OrderChecker::RecordBlock(uintptr_t begin, int stream) {
  absl::MutexLock lock(&mutex_);
  if (Memory* const memory = MemoryAt(begin)) {
    memory->recorded.push_back(stream);
  }
}

void OrderChecker::Free(uintptr_t begin) {
  absl::MutexLock lock(&mutex_);
  const auto at = memory_.find(begin);
  if (at == memory_.end()) return;
  Memory memory = std::move(at->second);
  memory_.erase(at);
  if (memory.stream < 0) return;
  Clock recorded;
  for (const int stream : memory.recorded) recorded.Join(Of(stream).clock);
  std::vector<Freed>& freed = freed_[memory.stream];
  freed.push_back({std::move(memory), std::move(recorded)});
}

void OrderChecker::CheckFreed() {
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < streams_.size(); ++i) {
    CheckFreedTo(static_cast<int>(i));
  }
}

void OrderChecker::CheckFreedTo(int stream) {
  const auto at = freed_.find(stream);
  if (at == freed_.end()) return;
  const std::vector<Freed> all = std::move(at->second);
  freed_.erase(at);
  for (const Freed& freed : all) {
    Clock knows = Of(stream).clock;
    knows.Join(freed.recorded);
    knows.Join(Host());
    const auto unknown = [&](const Past& past) {
      return past.what != nullptr && knows.of(past.stream) < past.task;
    };
    const Past* first = nullptr;
    for (const auto& [begin, span] : freed.memory.spans) {
      if (unknown(span.write)) first = &span.write;
      for (const Past& read : span.reads) {
        if (first == nullptr && unknown(read)) first = &read;
      }
    }
    if (first == nullptr) continue;
    AddFault(
        Fault::Kind::kReusedTooEarly,
        absl::StrCat(Name(freed.memory), " was freed and may be given out ",
                     "again by ", Of(stream).name, ", which does not wait for ",
                     Name(*first), ", which uses it: let that stream wait ",
                     "before the next allocation, or record_stream a tensor"));
  }
}

OrderChecker::Memory* OrderChecker::MemoryAt(uintptr_t address) {
  auto at = memory_.upper_bound(address);
  if (at == memory_.begin()) return nullptr;
  --at;
  return address < at->second.end ? &at->second : nullptr;
}

// ---- tasks

void OrderChecker::Launch(int stream, const std::string& what,
                          const std::vector<Access>& accesses,
                          const Describe& describe) {
  absl::MutexLock lock(&mutex_);
  Stream& of = streams_[static_cast<size_t>(stream)];
  of.clock.Join(Host());
  const Past past{Shared(what), stream, of.clock.of(stream) + 1};
  const Asker asker{&of.clock, false, absl::StrCat(what, " on ", of.name),
                    describe};
  std::vector<std::pair<Access, Memory*>> found;
  for (const Access& access : accesses) {
    if (access.begin == access.end) continue;
    Memory* const memory = MemoryAt(access.begin);
    if (memory == nullptr || access.end > memory->end) {
      AddFault(Fault::Kind::kNotAllocated,
               absl::StrCat(asker.name, ": ", describe(access.argument),
                            " lies in memory that was freed, or is none"));
      continue;
    }
    if (memory->device >= 0 && memory->device != of.device) {
      AddFault(
          Fault::Kind::kOtherDevice,
          absl::StrCat(asker.name, ": ", describe(access.argument), " lies in ",
                       Name(*memory), " of device ", memory->device));
    }
    Check(asker, access, memory);
    found.emplace_back(access, memory);
  }
  // This follows all checks: a task does not wait for itself.
  of.clock.Set(stream, past.task);
  for (const auto& [access, memory] : found) Note(access, past, memory);
}

void OrderChecker::HostAccess(const std::string& what, const Access& access) {
  absl::MutexLock lock(&mutex_);
  Memory* const memory = MemoryAt(access.begin);
  if (memory == nullptr || access.begin == access.end) return;
  Check({&Host(), true, absl::StrCat(what, " by the host"),
         [](int) { return "its memory"; }},
        access, memory);
}

OrderChecker::Spans::iterator OrderChecker::Split(Memory* memory,
                                                  const Access& access) {
  Spans& spans = memory->spans;
  for (const uintptr_t border : {access.begin, access.end}) {
    if (border >= memory->end) continue;
    const auto at = std::prev(spans.upper_bound(border));
    if (at->first == border) continue;
    Span right = at->second;
    at->second.end = border;
    spans.emplace(border, std::move(right));
  }
  return spans.find(access.begin);
}

void OrderChecker::Check(const Asker& asker, const Access& access,
                         Memory* memory) {
  for (auto at = Split(memory, access);
       at != memory->spans.end() && at->first < access.end; ++at) {
    CheckSpan(asker, access, *memory, at->first, at->second);
  }
}

void OrderChecker::CheckSpan(const Asker& asker, const Access& access,
                             const Memory& memory, uintptr_t begin,
                             const Span& span) {
  const auto unknown = [&](const Past& past) {
    return past.what != nullptr && asker.knows->of(past.stream) < past.task;
  };
  const Past* early = unknown(span.write) ? &span.write : nullptr;
  const char* verb = "writes";
  for (const Past& read : span.reads) {
    if (early != nullptr || !access.writes || !unknown(read)) continue;
    early = &read;
    verb = "reads";
  }
  if (early == nullptr) return;
  const Fault::Kind kind = asker.is_host   ? Fault::Kind::kHostAccessTooEarly
                           : access.writes ? Fault::Kind::kWriteTooEarly
                                           : Fault::Kind::kReadTooEarly;
  AddFault(kind,
           absl::StrCat(asker.name, access.writes ? " writes " : " reads ",
                        asker.describe(access.argument), ", bytes ",
                        begin - memory.begin, " to ", span.end - memory.begin,
                        " of ", Name(memory), ", and does not wait for ",
                        Name(*early), ", which ", verb, " there"));
}

// Records an access. A write merges all that it covers into one span.
void OrderChecker::Note(const Access& access, const Past& past,
                        Memory* memory) {
  auto at = Split(memory, access);
  if (access.writes) {
    at->second = {access.end, past, {}};
    ++at;
    while (at != memory->spans.end() && at->first < access.end) {
      at = memory->spans.erase(at);
    }
    return;
  }
  for (; at != memory->spans.end() && at->first < access.end; ++at) {
    std::vector<Past>& reads = at->second.reads;
    const auto same = std::find_if(
        reads.begin(), reads.end(),
        [&](const Past& read) { return read.stream == past.stream; });
    if (same == reads.end()) {
      reads.push_back(past);
    } else {
      *same = past;
    }
  }
}

// ---- faults

std::string OrderChecker::Name(const Past& past) const {
  return absl::StrCat(*past.what, " on ", Of(past.stream).name);
}

std::string OrderChecker::Name(const Memory& memory) {
  return absl::StrCat("block ", memory.number, " of ",
                      memory.end - memory.begin, " bytes, allocated for ",
                      memory.maker);
}

void OrderChecker::AddFault(Fault::Kind kind, std::string message) {
  if (faults_.empty()) std::fprintf(stderr, "%s\n", message.c_str());
  if (faults_.size() < kMostFaults)
    faults_.push_back({kind, std::move(message)});
}

void OrderChecker::AddFailure(std::string message) {
  absl::MutexLock lock(&mutex_);
  AddFault(Fault::Kind::kFailed, std::move(message));
}

std::vector<Fault> OrderChecker::faults() const {
  absl::MutexLock lock(&mutex_);
  return faults_;
}

void OrderChecker::ClearFaults() {
  absl::MutexLock lock(&mutex_);
  faults_.clear();
  freed_.clear();
}

}  // namespace testdevice
