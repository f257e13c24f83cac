#include "base/log.h"

#include <errno.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <map>

#include "absl/base/const_init.h"
#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tessera {
namespace {

// The rank is in the upper half, the world size in the lower; 0 is "not set".
std::atomic<uint64_t> g_rank_of_world{0};
std::atomic<FatalContextFn> g_fatal_context{nullptr};

using Levels = std::map<std::string, std::atomic<int>, std::less<>>;

ABSL_CONST_INIT absl::Mutex g_levels_mutex(absl::kConstInit);

// Sets the levels of `spec`, inserting modules as needed.
absl::Status ApplyLevels(absl::string_view spec, Levels& levels)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(g_levels_mutex) {
  for (absl::string_view entry : absl::StrSplit(spec, ',', absl::SkipEmpty())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    int level = 1;
    const bool has_level = entry.find('=') != absl::string_view::npos;
    if (parts.first.empty() ||
        (has_level && !absl::SimpleAtoi(parts.second, &level))) {
      return absl::InvalidArgumentError(absl::StrCat(
          "TESSERA_VERBOSE: expected module=level, got '", entry, "'"));
    }
    levels[std::string(parts.first)].store(level, std::memory_order_relaxed);
  }
  return absl::OkStatus();
}

// Never destroyed: threads may log while the process ends.
Levels& LockedLevels() ABSL_EXCLUSIVE_LOCKS_REQUIRED(g_levels_mutex) {
  static Levels* const levels = [] {
    g_levels_mutex.AssertHeld();  // a lambda is analysed by itself
    auto* made = new Levels;
    if (const char* spec = std::getenv("TESSERA_VERBOSE")) {
      if (absl::Status status = ApplyLevels(spec, *made); !status.ok()) {
        TESSERA_LOG(WARNING) << status.message();
      }
    }
    return made;
  }();
  return *levels;
}

char SeverityLetter(absl::LogSeverity severity) {
  return absl::LogSeverityName(severity)[0];
}

absl::string_view BaseName(absl::string_view path) {
  const size_t slash = path.rfind('/');
  return slash == absl::string_view::npos ? path : path.substr(slash + 1);
}

std::string FatalContextText() {
  // The context is taken, not read: one that fails a check itself must not
  // recurse.
  const FatalContextFn context = g_fatal_context.exchange(nullptr);
  return context == nullptr ? std::string() : context();
}

}  // namespace

void SetLogRank(int rank, int world_size) {
  g_rank_of_world.store(
      static_cast<uint64_t>(rank) << 32 | static_cast<uint32_t>(world_size),
      std::memory_order_relaxed);
}

absl::Status SetVerbosity(absl::string_view spec) {
  absl::MutexLock lock(&g_levels_mutex);
  return ApplyLevels(spec, LockedLevels());
}

void SetFatalContext(FatalContextFn context) { g_fatal_context = context; }

namespace log_internal {

bool IsRank0() {
  return g_rank_of_world.load(std::memory_order_relaxed) >> 32 == 0;
}

const std::atomic<int>* VerbosityOf(absl::string_view module) {
  absl::MutexLock lock(&g_levels_mutex);
  return &LockedLevels()[std::string(module)];
}

std::string LinePrefix(absl::LogSeverity severity, const char* file, int line) {
  const uint64_t rank_of_world =
      g_rank_of_world.load(std::memory_order_relaxed);
  std::string rank;
  if (rank_of_world != 0) {
    rank = absl::StrFormat("r%d/%d ", rank_of_world >> 32,
                           static_cast<uint32_t>(rank_of_world));
  }
  const std::string time =
      absl::FormatTime("%H:%M:%E3S", absl::Now(), absl::LocalTimeZone());
  return absl::StrFormat("%c %s %s%s:%d] ", SeverityLetter(severity), time,
                         rank, BaseName(file), line);
}

void WriteToStderr(absl::string_view text) {
  while (!text.empty()) {
    const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    text.remove_prefix(static_cast<size_t>(written));
  }
}

LogMessage::~LogMessage() {
  const int saved_errno = errno;
  WriteToStderr(
      absl::StrCat(LinePrefix(severity_, file_, line_), stream_.str(), "\n"));
  errno = saved_errno;
}

FatalMessage::~FatalMessage() {
  // The message comes first, since the context may itself crash.
  WriteToStderr(
      absl::StrCat(LinePrefix(absl::LogSeverity::kFatal, file_, line_),
                   stream_.str(), "\n"));
  const std::string context = FatalContextText();
  if (!context.empty()) WriteToStderr(absl::StrCat(context, "\n"));
  std::abort();
}

}  // namespace log_internal
}  // namespace tessera
