#include "testing/device/runtime.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "c10/util/Exception.h"

namespace testdevice {
namespace {

Runtime* the_runtime = nullptr;

constexpr int kStreams = 1 + Runtime::kPool;  // of a device
constexpr int kMostDevices = 8;

thread_local int t_device = 0;
thread_local int t_streams[kMostDevices] = {};  // their ids, by device

c10::Stream StreamOf(int device, int id) {
  return c10::Stream(c10::Stream::UNSAFE, TestDevice(device), id);
}

std::string NameOf(int device, int id) {
  return id == 0 ? absl::StrCat("the default stream of device ", device)
                 : absl::StrCat("stream ", id, " of device ", device);
}

}  // namespace

Runtime& Runtime::Get() {
  TORCH_CHECK(the_runtime != nullptr, "test device: Register it first");
  return *the_runtime;
}

void Runtime::Make(int devices) {
  TORCH_CHECK(devices >= 1 && devices <= kMostDevices, "test device: ", devices,
              " devices; there may be 1 to ", kMostDevices);
  // Never destroyed: tensors may outlive everything.
  if (the_runtime == nullptr) the_runtime = new Runtime(devices);
}

Runtime::Runtime(int devices) : devices_(devices), arena_(devices) {
  for (int device = 0; device < devices; ++device) {
    for (int id = 0; id < kStreams; ++id) {
      checker_.AddStream(NameOf(device, id), device);
    }
  }
  absl::MutexLock lock(&mutex_);
  workers_.resize(static_cast<size_t>(devices * kStreams));
}

// ---- streams

int Runtime::current_device() const { return t_device; }

void Runtime::set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < devices_, "test device: no device ",
              device, ", there are ", devices_);
  t_device = device;
}

c10::Stream Runtime::Current(int device) const {
  return StreamOf(device, t_streams[device]);
}

c10::Stream Runtime::Exchange(c10::Stream stream) {
  const int device = stream.device_index();
  const c10::Stream before = Current(device);
  t_streams[device] = static_cast<int>(stream.id());
  return before;
}

c10::Stream Runtime::Default(int device) const { return StreamOf(device, 0); }

c10::Stream Runtime::FromPool(int device, bool high_priority) {
  constexpr int kHalf = kPool / 2;
  return StreamOf(device, high_priority ? 1 + kHalf + next_of_high_++ % kHalf
                                        : 1 + next_of_pool_++ % kHalf);
}

int Runtime::NumberOf(c10::Stream stream) const {
  return stream.device_index() * kStreams + static_cast<int>(stream.id());
}

c10::Stream Runtime::StreamNumbered(int number) const {
  return StreamOf(number / kStreams, number % kStreams);
}

// ---- tasks

void Runtime::SetMode(Mode mode, uint64_t seed) {
  std::vector<std::shared_ptr<Worker>> before;
  {
    absl::MutexLock lock(&mutex_);
    has_workers_ = mode == Mode::kWorkers;
    seed_ = seed;
    before = std::exchange(workers_, {});
    workers_.resize(before.size());
  }
  before.clear();  // their tasks are done
  SweepFreed();
}

std::shared_ptr<Worker> Runtime::WorkerOf(c10::Stream stream) {
  if (!has_workers_) return nullptr;
  const auto number = static_cast<size_t>(NumberOf(stream));
  absl::MutexLock lock(&mutex_);
  std::shared_ptr<Worker>& worker = workers_[number];
  if (worker == nullptr) {
    worker = std::make_shared<Worker>(
        seed_ + number, [this](const std::string& what) {
          checker_.AddFailure(absl::StrCat("a task has failed: ", what));
        });
  }
  return worker;
}

void Runtime::Launch(c10::Stream stream, const std::string& what,
                     const std::vector<Access>& accesses,
                     const OrderChecker::Describe& describe,
                     std::function<void()> work) {
  checker_.Launch(NumberOf(stream), what, accesses, describe);
  CountLaunch(what, stream);
  if (const auto worker = WorkerOf(stream)) {
    worker->Push(std::move(work));
  } else {
    work();
  }
}

void Runtime::HostWait(c10::Stream stream, const std::string& what) {
  const Clock clock = checker_.Record(NumberOf(stream));
  if (const auto worker = WorkerOf(stream)) worker->Wait();
  checker_.HostWait(clock);
  Count(what);
}

void Runtime::HostWaitForDevice(int device, const std::string& what) {
  for (int id = 0; id < kStreams; ++id) {
    const c10::Stream stream = StreamNumbered(device * kStreams + id);
    const Clock clock = checker_.Record(NumberOf(stream));
    if (const auto worker = WorkerOf(stream)) worker->Wait();
    checker_.HostWait(clock);
  }
  Count(what);
}

void Runtime::Drain() {
  if (!has_workers_) return;
  std::vector<Worker::Done> all;
  {
    absl::MutexLock lock(&mutex_);
    for (const auto& worker : workers_) {
      if (worker != nullptr && !worker->IsCurrent()) {
        all.push_back(worker->Mark());
      }
    }
  }
  for (const Worker::Done& done : all) done->WaitForNotification();
}

std::vector<Worker::Done> Runtime::MarkAll() {
  std::vector<Worker::Done> all;
  absl::MutexLock lock(&mutex_);
  for (const auto& worker : workers_) {
    if (worker != nullptr) all.push_back(worker->Mark());
  }
  return all;
}

bool Runtime::IsIdle(c10::Stream stream) {
  const std::shared_ptr<Event> all = Record(stream);
  return Query(*all);
}

// ---- events

std::shared_ptr<Runtime::Event> Runtime::Record(c10::Stream stream) {
  auto event = std::make_shared<Event>();
  event->clock = checker_.Record(NumberOf(stream));
  if (const auto worker = WorkerOf(stream)) event->done = worker->Mark();
  return event;
}

void Runtime::Block(const Event& event, c10::Stream stream) {
  checker_.Block(NumberOf(stream), event.clock);
  if (event.done == nullptr) return;
  if (const auto worker = WorkerOf(stream)) {
    worker->Push([done = event.done] { done->WaitForNotification(); });
  }
}

bool Runtime::Query(const Event& event) {
  if (event.done != nullptr && !event.done->HasBeenNotified()) return false;
  checker_.HostWait(event.clock);
  return true;
}

void Runtime::HostWait(const Event& event, const std::string& what) {
  if (event.done != nullptr) event.done->WaitForNotification();
  checker_.HostWait(event.clock);
  Count(what);
}

// ---- memory

void Runtime::Poison(c10::Stream stream, uintptr_t begin, int64_t bytes) {
  void* const at = reinterpret_cast<void*>(arena_.OnHost(begin));
  const auto poison = [at, bytes] {
    std::memset(at, 0xff, static_cast<size_t>(bytes));
  };
  if (const auto worker = WorkerOf(stream)) {
    worker->Push(poison);
  } else {
    poison();
  }
}

void* Runtime::Allocate(int64_t bytes, const std::string& maker) {
  SweepFreed();
  const int device = t_device;
  const c10::Stream stream = Current(device);
  const uintptr_t begin = arena_.Allocate(device, NumberOf(stream), bytes);
  TORCH_CHECK_WITH(OutOfMemoryError, begin != 0, "test device ", device,
                   ": out of memory, ", bytes, " bytes were asked for, ",
                   arena_.held(device).allocated, " are allocated");
  checker_.Allocate(NumberOf(stream), device, begin, arena_.BytesOf(begin),
                    maker);
  Poison(stream, begin, arena_.BytesOf(begin));
  return reinterpret_cast<void*>(begin);
}

void Runtime::RecordStream(const void* address, c10::Stream stream) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const int number = NumberOf(stream);
  if (number == arena_.StreamOf(begin)) return;
  checker_.RecordBlock(begin, number);
  absl::MutexLock lock(&mutex_);
  recorded_[begin].push_back(number);
}

// Frees a block. One that was recorded on other streams is reused when these
// have done what they have been given by now.
void Runtime::Free(void* address) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  checker_.Free(begin);
  std::vector<int> recorded;
  {
    absl::MutexLock lock(&mutex_);
    const auto at = recorded_.find(begin);
    if (at != recorded_.end()) {
      recorded = std::move(at->second);
      recorded_.erase(at);
    }
  }
  const c10::Stream own = StreamNumbered(arena_.StreamOf(begin));
  if (!has_workers_ || recorded.empty()) {
    Poison(own, begin, arena_.BytesOf(begin));
    arena_.Free(begin);
    return;
  }
  Leaving leaving{begin, {}};
  recorded.push_back(NumberOf(own));
  for (const int number : recorded) {
    if (const auto worker = WorkerOf(StreamNumbered(number))) {
      leaving.until.push_back(worker->Mark());
    }
  }
  absl::MutexLock lock(&mutex_);
  leaving_.push_back(std::move(leaving));
}

void Runtime::SweepFreed() {
  std::vector<Leaving> gone;
  {
    absl::MutexLock lock(&mutex_);
    const auto stays = std::partition(
        leaving_.begin(), leaving_.end(), [](const Leaving& leaving) {
          return !std::all_of(
              leaving.until.begin(), leaving.until.end(),
              [](const auto& done) { return done->HasBeenNotified(); });
        });
    std::move(stays, leaving_.end(), std::back_inserter(gone));
    leaving_.erase(stays, leaving_.end());
  }
  for (const Leaving& leaving : gone) arena_.Free(leaving.begin);
}

// ---- counters

void Runtime::Count(const std::string& what) {
  char thread[16] = {};
  pthread_getname_np(pthread_self(), thread, sizeof(thread));
  absl::MutexLock lock(&mutex_);
  ++host_waits_[{what, thread}];
}

std::vector<HostWaited> Runtime::host_waits() const {
  absl::MutexLock lock(&mutex_);
  std::vector<HostWaited> all;
  for (const auto& [key, times] : host_waits_) {
    all.push_back({key.first, key.second, times});
  }
  return all;
}

void Runtime::CountLaunch(const std::string& what, c10::Stream stream) {
  absl::MutexLock lock(&mutex_);
  ++launches_[{what, NumberOf(stream)}];
}

std::map<std::string, int64_t> Runtime::launch_counts() const {
  absl::MutexLock lock(&mutex_);
  std::map<std::string, int64_t> counts;
  for (const auto& [key, times] : launches_) counts[key.first] += times;
  return counts;
}

int64_t Runtime::CountLaunches(const std::string& what,
                               c10::Stream stream) const {
  absl::MutexLock lock(&mutex_);
  const auto at = launches_.find({what, NumberOf(stream)});
  return at == launches_.end() ? 0 : at->second;
}

void Runtime::ResetHostWaits() {
  absl::MutexLock lock(&mutex_);
  host_waits_.clear();
}

}  // namespace testdevice
