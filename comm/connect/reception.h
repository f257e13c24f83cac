// Reception: takes the connections that come to a listening socket, and lets in
// those of this job's ranks (comm/connect/handshake.h).
//
// Strangers cost little: in a job without a secret, among this host's users
// only this process's own is answered; a connection that does not prove in time
// that it belongs to the job is closed, and so is the oldest of too many. One
// that has proved it is never closed: it may have received the last answer, and
// would think that this process has ended.
//
//   std::vector<pollfd> fds = {...};
//   const size_t begin = fds.size();
//   reception.AddTo(&fds);
//   poll(fds.data(), fds.size(), reception.timeout_ms());
//   for (const Guest& guest : reception.Look(&fds[begin])) ...
//
// Threads: one.
#ifndef COMM_CONNECT_RECEPTION_H_
#define COMM_CONNECT_RECEPTION_H_

#include <poll.h>

#include <list>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/monotonic.h"
#include "comm/connect/handshake.h"

namespace tessera {

// A rank that has been let in.
struct Guest {
  int fd = -1;  // non-blocking; the caller's
  int rank = -1;
};

class Reception {
 public:
  struct Options {
    std::string key;
    int own = -1;        // a rank that cannot come; -1: there is none
    int world_size = 0;  // ranks 0 to world_size - 1 may come
    int at_once = 0;     // how many of them come at once
    Clock clock = MonotonicNow;
  };

  // `listen_fd` is OpenListener's and stays the caller's.
  Reception(int listen_fd, Options options);
  // Closes the connections that are not let in yet.
  ~Reception();
  Reception(const Reception&) = delete;
  Reception& operator=(const Reception&) = delete;

  // Add what must be polled until the next Look, and return for how long at
  // most (-1: for ever).
  void AddTo(std::vector<pollfd>* fds) const;
  int timeout_ms() const;
  // Handles `fds`, which AddTo added and the caller has polled; returns new
  // guests. LOCAL, does not block.
  std::vector<Guest> Look(const pollfd* fds);

  // Whether a connection waits for which there was no descriptor at the last
  // look.
  bool starved() const { return starved_; }

 private:
  struct Visitor {
    Visitor(int socket, absl::Duration now, const Options& options)
        : fd(socket),
          since(now),
          greeting(options.key, options.own, options.world_size) {}

    int fd;
    absl::Duration since;
    Greeting greeting;
  };

  // Returns false once the visitor must be refused.
  bool Read(Visitor* visitor);
  void Accept();
  // Closes the oldest stranger; false if there is none of at least this age.
  bool DropStranger(absl::Duration age);

  const int listen_fd_;
  const Options options_;
  std::list<Visitor> visitors_;  // in the order in which they came
  bool starved_ = false;
};

}  // namespace tessera
#endif  // COMM_CONNECT_RECEPTION_H_
