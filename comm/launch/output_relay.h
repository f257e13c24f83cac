// What local ranks write, passed on by their parent with "[rank] " before each
// line, so that a reader sees who speaks and lines of ranks never mix.
//
//   rank 0 --stderr--> pipe --+
//   rank 1 --stderr--> pipe --+--> one thread of the parent --> its own stderr
//
// A line ends with \n or \r, so that a progress bar that draws itself again and
// again is passed on as it is drawn; one that begins its drawing with \r comes
// one drawing late. To the rank the pipe is no terminal. An error that several
// ranks end with is passed on once (final_lines.h).
#ifndef COMM_LAUNCH_OUTPUT_RELAY_H_
#define COMM_LAUNCH_OUTPUT_RELAY_H_

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "comm/launch/final_lines.h"

namespace tessera {

// Puts a prefix before each line of a text that comes in pieces. Pure.
class LinePrefixer {
 public:
  explicit LinePrefixer(std::string prefix) : prefix_(std::move(prefix)) {}

  // The whole lines that are there with this piece.
  std::string Add(absl::string_view piece);
  // What is left of a line without end, as a line; "" if nothing is.
  std::string Flush();

 private:
  std::string prefix_;
  std::string line_;           // what has come of it
  bool after_return_ = false;  // the last line ended with \r
};

class OutputRelay {
 public:
  // Which streams of the ranks; the others go where the parent's go.
  struct Options {
    int num_ranks = 1;
    bool out = false;
    bool err = true;
  };

  // Returns Unavailable if the system has no more pipes, ResourceExhausted if
  // it has no more threads.
  static absl::StatusOr<std::unique_ptr<OutputRelay>> Start(Options options);
  // Finishes.
  ~OutputRelay();
  OutputRelay(const OutputRelay&) = delete;
  OutputRelay& operator=(const OutputRelay&) = delete;

  // Descriptors for SelfExecOptions::fds of `rank`.
  std::vector<std::pair<int, int>> ChildFds(int rank) const;
  // The rank has its own copies of them: closes ours.
  void Started(int rank);

  // The rank has ended: passes on what it has written, with its last line if
  // that lacks an end, and then writes `line` to stderr, unless it is empty.
  // ASYNC: never waits for who reads.
  void Ended(int rank, std::string line);

  // Waits until all of that is written. What children of ended ranks write
  // later is lost.
  void Finish();

 private:
  struct Stream {
    int rank = 0;
    int read_fd = -1;   // -1 at its end
    int write_fd = -1;  // the child's, -1 once started
    int to = -1;        // STDOUT_FILENO or STDERR_FILENO
    LinePrefixer lines{""};
  };

  OutputRelay() = default;
  absl::Status AddStream(int rank, int to);
  void Run();
  // Reads what is there now.
  void Drain(Stream* stream);
  // Writes whole lines, with their prefixes.
  void Pass(const Stream& stream, absl::string_view lines);
  int TimeoutMs() const;
  // True when there is nothing more to do.
  bool HandleEnds();
  void Wake();

  std::vector<Stream>
      streams_;  // read_fd and lines: the thread's, once it runs
  std::unique_ptr<FinalLines> final_;  // the thread's
  int wake_[2] = {-1, -1};
  std::thread thread_;
  absl::Mutex mutex_;
  std::vector<std::pair<int, std::string>> ended_ ABSL_GUARDED_BY(mutex_);
  bool finish_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera
#endif  // COMM_LAUNCH_OUTPUT_RELAY_H_
