// Runs programs that a test watches: this test program again, which a variable
// turns into something else than the test.
#ifndef TESTS_SUPPORT_PROCESS_H_
#define TESTS_SUPPORT_PROCESS_H_

#include <sys/types.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tessera {

using Env = std::vector<std::pair<std::string, std::string>>;

struct Finished {
  int code = -1;  // as a shell reports it; -1: had to be killed
  std::string out;
  std::string err;
  absl::Duration took;
};

// A child. It is killed when this object is destroyed, and when the test
// program ends.
class Process {
 public:
  // By a fork of a server if the program has one (tests/support/fork_server.h)
  // and `by_exec` is false.
  Process(std::vector<std::string> args, Env env, bool by_exec = false);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }

  // Waits until both pipes are at their end, which is when neither the process
  // nor its ranks have them any more.
  Finished Finish(absl::Duration allowed = absl::Seconds(60));
  // Waits until stdout has `count` lines.
  bool WaitForLines(int count);
  // Returns its output so far.
  const std::string& out() const { return text_[0]; }

 private:
  void Read(absl::Time deadline);

  const absl::Time begin_ = absl::Now();
  pid_t pid_ = 0;
  int pipes_[2] = {-1, -1};
  std::string text_[2];
};

// A listening socket of this process on a port that the system chose.
class ListeningPort {
 public:
  ListeningPort();
  ~ListeningPort();
  ListeningPort(const ListeningPort&) = delete;
  ListeningPort& operator=(const ListeningPort&) = delete;
  int port() const { return port_; }

 private:
  int fd_;
  int port_;
};

// Returns a port on which nobody listened a moment ago.
int FreePort();

}  // namespace tessera
#endif  // TESTS_SUPPORT_PROCESS_H_
