// OrderChecker checks the rules of streams, events and reused memory by vector
// clocks. It sees tasks as they are launched, not as they happen to run, so it
// finds each missing wait the first time, whatever the timing:
//
//   stream 1:  mm writes [0, 64)  ---- event ---.
//   stream 2:                                   '-> add reads [0, 64)   right
//   stream 2:  add reads [0, 64)                 a fault: it names both
//
// A task knows as done: all earlier tasks of its own stream, the events that
// the stream waited for, and what the launching host thread waited for. A
// thread that has waited for a stream and lets another thread launch dependent
// work hands it an event.
//
// A block of memory belongs to the stream that was current when it was
// allocated. That stream may get the memory again for its next allocation, so
// by then it must know of all accesses, except those of streams that the block
// was recorded on (Tensor::record_stream). Otherwise that is a fault, whether
// or not the memory was in fact given out again. The stream may have used a new
// block's memory before: other streams have to wait for that.
//
// Nothing here depends on torch. Threads: any.
#ifndef TESTING_DEVICE_ORDER_CHECKER_H_
#define TESTING_DEVICE_ORDER_CHECKER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "testing/device/clock.h"

namespace testdevice {

struct Access {
  uintptr_t begin = 0, end = 0;
  bool writes = false;  // and may read
  int argument = -1;    // index of the task's argument
};

struct Fault {
  enum class Kind {
    kReadTooEarly,        // of what another stream will write
    kWriteTooEarly,       // where another stream will read or write
    kReusedTooEarly,      // freed while another stream will read or write
    kNotAllocated,        // freed before, or never there
    kOtherDevice,         // memory of another device than the stream's
    kHostAccessTooEarly,  // by the host, of memory that a stream works on
    kFailed,              // a task has thrown
  };
  Kind kind;
  std::string message;  // both tasks, their streams, the memory
};

class OrderChecker {
 public:
  // Describes a task's argument for messages: "argument 1, float [4, 8]".
  using Describe = std::function<std::string(int argument)>;

  // Adds a stream and returns its number, from 0. `name` is for messages.
  int AddStream(std::string name, int device);

  // ---- Order.

  // Returns what an event knows that this host thread records on `stream` now.
  Clock Record(int stream);
  // Orders what `stream` runs from here on after `event`.
  void Block(int stream, const Clock& event);
  // Notes that this host thread has waited for `event`; Record(stream) stands
  // for all of a stream.
  void HostWait(const Clock& event);

  // ---- Memory.

  // Notes that `stream` allocates [begin, begin + bytes) on `device`, for
  // `maker`.
  void Allocate(int stream, int device, uintptr_t begin, int64_t bytes,
                const std::string& maker);
  void RecordBlock(uintptr_t begin, int stream);
  void Free(uintptr_t begin);

  // ---- Tasks.

  void Launch(int stream, const std::string& what,
              const std::vector<Access>& accesses, const Describe& describe);
  // Notes that the host itself reads or writes there, at once.
  void HostAccess(const std::string& what, const Access& access);
  // Notes host memory that streams read and write (pinned). Freeing it waits
  // for them.
  void AllocateOnHost(uintptr_t begin, int64_t bytes);

  // Checks freed memory of all streams now; otherwise it is checked when its
  // stream allocates next.
  void CheckFreed();
  // Adds what a task has thrown as a fault, though it does not concern order.
  void AddFailure(std::string message);

  std::vector<Fault> faults() const;
  // Forgets the faults found, and those of memory that was freed before.
  void ClearFaults();

 private:
  struct Stream {
    std::string name;
    int device = 0;
    Clock clock;  // its own entry: tasks launched
  };
  // One access of a task. Copies share the name.
  struct Past {
    std::shared_ptr<const std::string> what;
    int stream = 0;
    int64_t task = 0;  // its number in the stream, from 1
  };
  struct Span {
    uintptr_t end = 0;
    Past write;               // `what` is null: nobody has written
    std::vector<Past> reads;  // since the write; one for each stream
  };
  using Spans = std::map<uintptr_t, Span>;  // by begin
  struct Memory {
    uintptr_t begin = 0, end = 0;
    int stream = -1;  // -1: the host's
    int device = -1;
    int64_t number = 0;
    std::string maker;
    std::vector<int> recorded;  // streams
    Spans spans;
  };
  struct Freed {
    Memory memory;
    Clock recorded;  // of the streams it was recorded on, when it was freed
  };
  // Asker is who accesses: a stream's next task, or the host.
  struct Asker {
    const Clock* knows;
    bool is_host;
    std::string name;
    Describe describe;
  };

  Memory* MemoryAt(uintptr_t address) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Check(const Asker& asker, const Access& access, Memory* memory)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckSpan(const Asker& asker, const Access& access, const Memory& memory,
                 uintptr_t begin, const Span& span)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Checks what was freed to `stream`, which is about to allocate.
  void CheckFreedTo(int stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Clock& Host() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return hosts_[std::this_thread::get_id()];
  }
  // Splits spans at the access's borders.
  static Spans::iterator Split(Memory* memory, const Access& access);
  void Note(const Access& access, const Past& past, Memory* memory)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const Stream& Of(int stream) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return streams_[static_cast<size_t>(stream)];
  }
  std::string Name(const Past& past) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static std::string Name(const Memory& memory);
  void AddFault(Fault::Kind kind, std::string message)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  std::vector<Stream> streams_ ABSL_GUARDED_BY(mutex_);
  std::map<std::thread::id, Clock> hosts_ ABSL_GUARDED_BY(mutex_);
  std::map<uintptr_t, Memory> memory_ ABSL_GUARDED_BY(mutex_);  // by begin
  // By stream, memory that its next allocation may get.
  std::map<int, std::vector<Freed>> freed_ ABSL_GUARDED_BY(mutex_);
  int64_t blocks_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<Fault> faults_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace testdevice
#endif  // TESTING_DEVICE_ORDER_CHECKER_H_
