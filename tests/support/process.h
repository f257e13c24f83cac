// Programs that a test runs and watches: this test program again, told by a
// variable to be something else than the test.
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
  int code = -1;  // as a shell gives it; -1: had to be killed
  std::string out;
  std::string err;
  absl::Duration took;
};

// A child. It is killed when this object goes, and when the test program ends.
class Process {
 public:
  Process(std::vector<std::string> args, Env env);
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  pid_t pid() const { return pid_; }

  // Until both pipes are at their end, which is when nobody is left who has
  // them: neither the process nor its ranks.
  Finished Finish(absl::Duration allowed = absl::Seconds(60));
  // Until stdout has `count` lines.
  bool WaitForLines(int count);
  // What has come of it so far.
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

// A port on which nobody listened a moment ago.
int FreePort();

}  // namespace tessera
#endif  // TESTS_SUPPORT_PROCESS_H_
