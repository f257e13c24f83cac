#include "comm/launch/output_relay.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/system/system_limits.h"
#include "base/thread/start_thread.h"

namespace tessera {
namespace {

// A line that is longer is passed on in pieces.
constexpr size_t kMaxLineBytes = 64 << 10;

absl::Status NoPipe(int error) {
  return absl::UnavailableError(
      absl::StrCat("no pipe for what ranks write: ", strerror(error),
                   DescriptorLimit(error)));
}

// Whoever reads may have made the descriptor non-blocking, or have gone: then
// what is left is dropped.
void WriteAll(int fd, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EAGAIN) {
      pollfd ready = {fd, POLLOUT, 0};
      poll(&ready, 1, -1);
    } else if (errno != EINTR) {
      return;
    }
  }
}

}  // namespace

std::string LinePrefixer::Add(absl::string_view piece) {
  std::string out;
  for (const char c : piece) {
    const bool bare =
        line_.empty() && (c == '\r' || (c == '\n' && after_return_));
    if (bare) {
      out.push_back(c);
    } else if (c != '\n' && c != '\r') {
      line_.push_back(c);
      if (line_.size() >= kMaxLineBytes) out += Flush();
    } else {
      absl::StrAppend(&out, prefix_, line_, absl::string_view(&c, 1));
      line_.clear();
    }
    after_return_ = c == '\r';
  }
  return out;
}

std::string LinePrefixer::Flush() {
  if (line_.empty()) return "";
  std::string out = absl::StrCat(prefix_, line_, "\n");
  line_.clear();
  return out;
}

absl::StatusOr<std::unique_ptr<OutputRelay>> OutputRelay::Start(
    Options options) {
  std::unique_ptr<OutputRelay> relay(new OutputRelay);
  if (pipe2(relay->wake_, O_CLOEXEC | O_NONBLOCK) != 0) {
    return NoPipe(errno);
  }
  relay->final_ = std::make_unique<FinalLines>(options.num_ranks);
  for (int r = 0; r < options.num_ranks; ++r) {
    if (options.out) {
      TESSERA_RETURN_IF_ERROR(relay->AddStream(r, STDOUT_FILENO));
    }
    if (options.err) {
      TESSERA_RETURN_IF_ERROR(relay->AddStream(r, STDERR_FILENO));
    }
  }
  TESSERA_ASSIGN_OR_RETURN(
      relay->thread_,
      StartThread("tessera-relay", [raw = relay.get()] { raw->Run(); }));
  return relay;
}

OutputRelay::~OutputRelay() {
  Finish();
  for (const Stream& stream : streams_) {
    if (stream.read_fd >= 0) close(stream.read_fd);
    if (stream.write_fd >= 0) close(stream.write_fd);
  }
  for (int fd : wake_) {
    if (fd >= 0) close(fd);
  }
}

absl::Status OutputRelay::AddStream(int rank, int to) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return NoPipe(errno);
  }
  // Ours only: the rank's end must block.
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  streams_.push_back({rank, ends[0], ends[1], to,
                      LinePrefixer(absl::StrCat("[", rank, "] "))});
  return absl::OkStatus();
}

std::vector<std::pair<int, int>> OutputRelay::ChildFds(int rank) const {
  std::vector<std::pair<int, int>> fds;
  for (const Stream& stream : streams_) {
    if (stream.rank == rank) fds.emplace_back(stream.write_fd, stream.to);
  }
  return fds;
}

void OutputRelay::Started(int rank) {
  for (Stream& stream : streams_) {
    if (stream.rank != rank || stream.write_fd < 0) continue;
    close(stream.write_fd);
    stream.write_fd = -1;
  }
}

void OutputRelay::Ended(int rank, std::string line) {
  {
    absl::MutexLock lock(&mutex_);
    ended_.emplace_back(rank, std::move(line));
  }
  Wake();
}

void OutputRelay::Finish() {
  if (!thread_.joinable()) return;
  {
    absl::MutexLock lock(&mutex_);
    finish_ = true;
  }
  Wake();
  thread_.join();
}

void OutputRelay::Wake() {
  // A full pipe is no harm: the thread is awake and looks at everything.
  if (write(wake_[1], "", 1) < 0) errno = 0;
}

void OutputRelay::Run() {
  while (true) {
    std::vector<pollfd> fds = {{wake_[0], POLLIN, 0}};
    // poll passes over those that are -1.
    for (const Stream& stream : streams_) {
      fds.push_back({stream.read_fd, POLLIN, 0});
    }
    if (poll(fds.data(), fds.size(), TimeoutMs()) < 0) continue;
    WriteAll(STDERR_FILENO, final_->Due(MonotonicNow()));
    for (size_t i = 0; i < streams_.size(); ++i) {
      if (fds[i + 1].revents != 0) Drain(&streams_[i]);
    }
    if (fds[0].revents != 0 && HandleEnds()) return;
  }
}

void OutputRelay::Drain(Stream* stream) {
  char buffer[1 << 16];
  while (stream->read_fd >= 0) {
    const ssize_t got = read(stream->read_fd, buffer, sizeof(buffer));
    if (got > 0) {
      Pass(*stream, stream->lines.Add({buffer, static_cast<size_t>(got)}));
    } else if (got < 0 && errno == EAGAIN) {
      return;
    } else if (got == 0 || errno != EINTR) {
      Pass(*stream, stream->lines.Flush());
      close(stream->read_fd);
      stream->read_fd = -1;
    }
  }
}

// A piece without the prefix is a bare end of a line, see LinePrefixer.
void OutputRelay::Pass(const Stream& stream, absl::string_view lines) {
  if (stream.to != STDERR_FILENO) return WriteAll(stream.to, lines);
  const std::string prefix = absl::StrCat("[", stream.rank, "] ");
  std::string out;
  while (!lines.empty()) {
    absl::string_view line = lines.substr(0, lines.find_first_of("\r\n") + 1);
    lines.remove_prefix(line.size());
    if (absl::ConsumePrefix(&line, prefix)) {
      out += final_->Add(stream.rank, line, MonotonicNow());
    } else {
      absl::StrAppend(&out, line);
    }
  }
  WriteAll(stream.to, out);
}

int OutputRelay::TimeoutMs() const {
  const absl::Duration next = final_->next();
  if (next == absl::InfiniteDuration()) return -1;
  const absl::Duration left = next - MonotonicNow() + absl::Milliseconds(1);
  return static_cast<int>(absl::ToInt64Milliseconds(
      std::clamp(left, absl::ZeroDuration(), FinalLines::kHeld)));
}

bool OutputRelay::HandleEnds() {
  char byte;
  while (read(wake_[0], &byte, 1) == 1) {
  }
  std::vector<std::pair<int, std::string>> ended;
  bool finish = false;
  {
    absl::MutexLock lock(&mutex_);
    ended.swap(ended_);
    finish = finish_;
  }
  for (const auto& [rank, line] : ended) {
    for (Stream& stream : streams_) {
      if (stream.rank != rank) continue;
      Drain(&stream);
      Pass(stream, stream.lines.Flush());
    }
    if (!line.empty()) WriteAll(STDERR_FILENO, final_->AddOwn(line));
  }
  if (finish) WriteAll(STDERR_FILENO, final_->All());
  return finish;
}

}  // namespace tessera
