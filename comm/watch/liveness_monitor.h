// LivenessMonitor: notices, within moments, that the process of a rank has
// ended.
//
//   rank 1 ---- TCP ----.
//   rank 2 ---- TCP ----+- rank 0      nothing is sent while all is well
//   rank 3 ---- TCP ----'
//
// The kernel closes a dead process's connection, so rank 0 sees that at once
// and informs the others; each rank sees the end of rank 0 itself. A stopped
// process keeps its connections: it has not ended. A host that vanishes is
// noticed by keep-alive after about 20 seconds. Once rank 0 has left in an
// orderly way, nobody is informed any more.
//
// A rank that leaves in an orderly way (the destructor, or exit()) says so.
//
// A child that a rank has forked holds no connection of the rank's
// (base/system/close_on_fork.h). However it was made, the launcher of --world
// sees who has ended, and tells the others (TakeLauncherNews), who believe it
// after kNewsGrace.
//
// Only ranks of the job are let in (comm/connect/reception.h).
//
// Threads: all calls may come from any thread.
#ifndef COMM_WATCH_LIVENESS_MONITOR_H_
#define COMM_WATCH_LIVENESS_MONITOR_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/monotonic.h"
#include "base/thread/monotonic_wait.h"
#include "comm/connect/reception.h"

namespace c10d {
class Store;
}

namespace tessera {

// A rank whose process no longer takes part.
struct EndedRank {
  int rank = 0;
  bool left = false;     // in an orderly way
  absl::Duration since;  // the time when it was heard of
};

// The launcher's word may come before a rank's own that it leaves.
inline constexpr absl::Duration kNewsGrace = absl::Seconds(1);

class LivenessMonitor {
 public:
  // Connects with rank 0; waits for its address in `store` (key "liveness").
  // `same_host`: all ranks run here, so rank 0 listens on the loopback only.
  // Where there is no way to connect the result knows of nobody's end. LOCAL,
  // except that it asks the store.
  static std::unique_ptr<LivenessMonitor> Create(c10d::Store& store, int rank,
                                                 int world_size, bool same_host,
                                                 Clock clock = MonotonicNow);
  ~LivenessMonitor();
  LivenessMonitor(const LivenessMonitor&) = delete;
  LivenessMonitor& operator=(const LivenessMonitor&) = delete;

  // The ranks that have ended, in the order in which that was heard.
  std::vector<EndedRank> Ended() const;
  // Waits until a rank has ended, `timeout` at most. Returns false at once if
  // this monitor is not connected.
  bool WaitForEnd(absl::Duration timeout) const;
  // Returns whether rank 0 answers: false if it is stopped, cannot be reached,
  // or is slower than `timeout`. True on rank 0, and if this monitor is not
  // connected.
  bool Rank0Answers(absl::Duration timeout) const;

 private:
  struct Peer {
    int fd = -1;
    int rank = -1;
    bool left = false;
    std::string in;
  };

  LivenessMonitor(int rank, int world_size, Clock clock)
      : rank_(rank), world_size_(world_size), clock_(std::move(clock)) {}
  void Listen(c10d::Store& store, bool same_host);
  void Connect(c10d::Store& store);
  void StartThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void Run();
  void ReadNews();
  void NoteNews() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Welcome(const Guest& guest) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // False once the connection is of no more use.
  bool Read(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Understand(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Lost(const Peer& peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Note(int rank, bool left) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Tell(int fd, char kind, int rank);
  void SayBye();
  static void AllSayBye();

  const int rank_;
  const int world_size_;
  const Clock clock_;
  int listen_fd_ = -1;  // of rank 0
  int stop_fd_ = -1;    // an eventfd
  // The launcher's, and what it has told that is not yet noted: the thread's.
  int news_fd_ = -1;
  std::vector<std::pair<int, absl::Duration>> news_;

  mutable MonotonicMutex mutex_;
  mutable bool answered_ ABSL_GUARDED_BY(mutex_) = false;  // the last question
  bool connected_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<EndedRank> ended_ ABSL_GUARDED_BY(mutex_);
  std::vector<Peer> peers_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<Reception> reception_;  // of rank 0; the thread's
  std::thread thread_;
};

}  // namespace tessera
#endif  // COMM_WATCH_LIVENESS_MONITOR_H_
