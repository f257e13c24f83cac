// The log is for people: one line per message on stderr.
//
//   TESSERA_LOG(WARNING) << "rank " << r << " is late";
//   TESSERA_LOG_RANK0(INFO) << "once per job";
//   TESSERA_VLOG(comm, 2) << "all-gather #" << n;
//
//   W 08:45:01.123 r3/8 comm_thread.cc:88] rank 2 is late
//   ^ severity      ^ rank/world size, from SetLogRank on
//
// Severities are INFO, WARNING, ERROR and FATAL. FATAL ends as a failed check
// does (base/check.h): with the registered context, then abort().
//
// TESSERA_VLOG is off unless the environment enables it by module:
// TESSERA_VERBOSE=comm=2,sharding=1 lets levels up to 2 of comm and 1 of
// sharding through; a bare `comm` means comm=1. While off it costs one load,
// and its operands are not evaluated.
//
// Threads: everything here may be called from any thread; a message is written
// by one write(2), so lines of threads and processes do not mix.
#ifndef BASE_LOG_H_
#define BASE_LOG_H_

#include <atomic>
#include <sstream>
#include <string>

#include "absl/base/log_severity.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Puts "r<rank>/<world_size>" into every later line of this process.
void SetLogRank(int rank, int world_size);

// Sets levels as TESSERA_VERBOSE does; modules that are not named keep theirs.
// Returns InvalidArgument naming the entry that is not `module[=level]`; the
// good entries before it hold.
absl::Status SetVerbosity(absl::string_view spec);

namespace log_internal {

// Returns true before SetLogRank, and on rank 0 after it.
bool IsRank0();

// Returns the level of a module; the pointer is valid for ever.
const std::atomic<int>* VerbosityOf(absl::string_view module);

// Returns "W 08:45:01.123 r3/8 file.cc:88] ".
std::string LinePrefix(absl::LogSeverity severity, const char* file, int line);

// Writes all of `text`, whatever stderr is; errors are dropped.
void WriteToStderr(absl::string_view text);

// Collects one message, writes it at the end of the statement.
class LogMessage {
 public:
  LogMessage(absl::LogSeverity severity, const char* file, int line)
      : severity_(severity), file_(file), line_(line) {}
  ~LogMessage();
  LogMessage(const LogMessage&) = delete;
  LogMessage& operator=(const LogMessage&) = delete;

  std::ostream& stream() { return stream_; }

 private:
  absl::LogSeverity severity_;
  const char* file_;
  int line_;
  std::ostringstream stream_;
};

// Writes its message as LogMessage does, then calls abort().
class FatalMessage {
 public:
  FatalMessage(const char* file, int line) : file_(file), line_(line) {}
  [[noreturn]] ~FatalMessage();
  FatalMessage(const FatalMessage&) = delete;
  FatalMessage& operator=(const FatalMessage&) = delete;

  std::ostream& stream() { return stream_; }

 private:
  const char* file_;
  int line_;
  std::ostringstream stream_;
};

// Makes both branches of ?: void; & binds weaker than << and stronger than ?:.
struct Voidify {
  void operator&(std::ostream&) const {}
};

}  // namespace log_internal

// Registers a function whose text FATAL messages and failed checks append, such
// as the last collectives. It is called once, on the failing thread, which may
// hold any lock. nullptr unregisters it.
using FatalContextFn = std::string (*)();
void SetFatalContext(FatalContextFn context);

}  // namespace tessera

#define TESSERA_LOG(severity) TESSERA_LOG_INTERNAL_##severity.stream()

#define TESSERA_LOG_RANK0(severity)   \
  !::tessera::log_internal::IsRank0() \
      ? (void)0                       \
      : ::tessera::log_internal::Voidify() & TESSERA_LOG(severity)

#define TESSERA_VLOG(module, level)                                     \
  !([](int tessera_level) {                                             \
    static const std::atomic<int>* const verbosity =                    \
        ::tessera::log_internal::VerbosityOf(#module);                  \
    return verbosity->load(std::memory_order_relaxed) >= tessera_level; \
  }(level))                                                             \
      ? (void)0                                                         \
      : ::tessera::log_internal::Voidify() & TESSERA_LOG(INFO)

#define TESSERA_LOG_INTERNAL_INFO                                           \
  ::tessera::log_internal::LogMessage(::absl::LogSeverity::kInfo, __FILE__, \
                                      __LINE__)
#define TESSERA_LOG_INTERNAL_WARNING                                           \
  ::tessera::log_internal::LogMessage(::absl::LogSeverity::kWarning, __FILE__, \
                                      __LINE__)
#define TESSERA_LOG_INTERNAL_ERROR                                           \
  ::tessera::log_internal::LogMessage(::absl::LogSeverity::kError, __FILE__, \
                                      __LINE__)
#define TESSERA_LOG_INTERNAL_FATAL \
  ::tessera::log_internal::FatalMessage(__FILE__, __LINE__)

#endif  // BASE_LOG_H_
