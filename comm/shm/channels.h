// Channels: messages between two ranks of a Team, by tag.
//
//   head of rank r   [ Control | staging | pipe to 0 | pipe to 1 | ... ]
//   pipe             a ring of records: a short message itself, or where a long
//                    one lies in r's heap; and word back that one was read
//
// A short message is through when it is in the pipe; a long one when it was
// read, until when its memory must stay as it is. A long one that does not lie
// in memory that the others map is copied there first.
//
// Between two ranks, messages of one tag are received in the order in which
// they were sent; receives of one tag, in the order in which they were posted.
// What nobody has posted a receive for yet waits with the receiver, short ones
// in its memory (the ledger's kCommunication).
//
// A thread of each rank that has ever sent or received moves what waits; it
// sleeps otherwise (futex).
//
// Errors, as told to Done:
//   InvalidArgument    the message and its receive differ in size (the receive)
//   DeadlineExceeded   the other rank has not come within the timeout
//   Unavailable, ...   what `gone` said of the other rank, or Abort was given
// After DeadlineExceeded or Abort all that is under way, and to come, fails,
// and so does what others wait for from this rank: who still reads a message
// that its sender has given up gets an error too.
//
// Threads: any.
#ifndef COMM_SHM_CHANNELS_H_
#define COMM_SHM_CHANNELS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/memory/memory.h"
#include "comm/shm/exchange.h"
#include "comm/shm/mutex.h"
#include "comm/shm/pipe.h"
#include "comm/shm/team.h"

namespace tessera::shm {

// Of all pipes, after the staging area.
inline constexpr int64_t kPipesOffset = kControlBytes + kStagingBytes;
inline constexpr int64_t kPipesBytes =
    kMaxRanks * static_cast<int64_t>(sizeof(Pipe));
// Sparse: pages are there only where something was written.
inline constexpr int64_t kHeadBytes = kPipesOffset + kPipesBytes;

class Channels {
 public:
  // How it ended, and the other rank. Called on any thread, without locks.
  using Done = std::function<void(const absl::Status&, int peer)>;
  struct Options {
    absl::Duration timeout = absl::Minutes(5);  // of one message
    // Says that a rank is gone, and how; asked now and then. May be null.
    std::function<absl::Status(int peer)> gone;
  };
  static constexpr int kAnyPeer = -1;

  // The team outlives this.
  Channels(Team* team, Options options);
  ~Channels();  // what is under way fails

  // `data` stays alive and as it is until `done`. LOCAL, ASYNC.
  void Send(int to, int64_t tag, const void* data, int64_t bytes, Done done);
  // `from` may be kAnyPeer. LOCAL, ASYNC.
  void Receive(int from, int64_t tag, void* data, int64_t bytes, Done done);

  void Abort(const absl::Status& why);

  // True on the message thread of any.
  static bool IsCurrent();

 private:
  struct Outbound {
    Record record;
    // Of a short message:
    const void* data = nullptr;
    Done done;
    absl::Duration deadline;
  };
  struct LongSend {
    int to;
    uint64_t id;
    int64_t tag;
    CountedBuffer copy;
    Done done;
    absl::Duration deadline;
  };
  struct Arrived {  // and not yet asked for
    Record record;
    CountedBuffer data;
  };
  struct Wanted {
    int from;
    int64_t tag;
    void* data;
    int64_t bytes;
    Done done;
    absl::Duration deadline;
  };
  using Endings = std::vector<std::function<void()>>;

  Pipe& PipeOf(int from, int to) const;

  // Moves what can be moved; true if anything was.
  bool Progress(Endings* endings) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool WriteTo(int to, Endings* endings) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool ReadFrom(int from, Endings* endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Take(int from, Arrived arrived, Endings* endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Deliver(int from, const Arrived& arrived, Wanted wanted,
               Endings* endings) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WasRead(int from, uint64_t id, Endings* endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Prepare(const void* data, int64_t bytes, LongSend* send,
                       int64_t* offset) const;
  // Ends what waits for too long, or for ranks that are gone.
  void EndHopeless(Endings* endings) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The first message that should be through by now, for words; "" if none.
  std::string Overdue() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool WaitsFor(int peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Why the rest of what a rank has to say will not come; OK if it may.
  absl::Status Lost(int peer) const;
  void FailAll(const absl::Status& why, Endings* endings)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Idle() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Progress, and EndHopeless when it is time. For how long nothing is to be
  // done unless the door rings; zero if anything moved.
  absl::Duration Step();
  void Run();
  static void AddEnding(Done done, const absl::Status& status, int peer,
                        Endings* endings);
  static void Call(const Endings& endings);

  Team* const team_;
  const Options options_;
  std::atomic<bool> stop_{false};
  Mutex mutex_;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;
  absl::Duration look_at_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::deque<Outbound>> outbound_
      ABSL_GUARDED_BY(mutex_);                                        // by rank
  std::vector<std::deque<Arrived>> arrived_ ABSL_GUARDED_BY(mutex_);  // by rank
  std::vector<LongSend> long_sends_ ABSL_GUARDED_BY(mutex_);
  std::deque<Wanted> wanted_ ABSL_GUARDED_BY(mutex_);  // as posted
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera::shm
#endif  // COMM_SHM_CHANNELS_H_
