// Why a thread that writes, and is not waited for if it takes long: who dumps
// is the one thread that ends waits. A network's file system that hangs would
// hold it, and all of this process's deadlines with it.
#include "comm/record/hang_dump.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/env.h"
#include "base/log.h"
#include "base/thread/monotonic_wait.h"
#include "base/thread/start_thread.h"
#include "base/thread/thread_stacks.h"
#include "comm/record/flight_recorder.h"

namespace tessera {
namespace {

ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);
std::string& Folder() ABSL_EXCLUSIVE_LOCKS_REQUIRED(g_mutex) {
  static auto* const folder = new std::string;
  return *folder;
}

std::string ChosenFolder() {
  absl::MutexLock lock(&g_mutex);
  if (!Folder().empty()) return Folder();
  const std::optional<std::string> wanted = EnvString("TESSERA_DUMP_FOLDER");
  return wanted.value_or(EnvString("TMPDIR").value_or("/tmp"));
}

HangDumpWriter& Writer() ABSL_EXCLUSIVE_LOCKS_REQUIRED(g_mutex) {
  static auto* const writer = new HangDumpWriter;
  return *writer;
}

// A new file of our own: in a shared /tmp a name may be a trap. Returns errno.
int WriteNew(const std::string& path, absl::string_view text) {
  unlink(path.c_str());
  const int fd = open(
      path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return errno;
  int error = 0;
  while (error == 0 && !text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written > 0) {
      text.remove_prefix(written);
    } else if (written == 0 || errno != EINTR) {
      error = written == 0 ? EIO : errno;
    }
  }
  if (close(fd) != 0 && error == 0) error = errno;
  return error;
}

// What WriteNew returned; ETIMEDOUT if it has not yet.
int WriteWithPatience(const std::string& path, const std::string& text) {
  struct Outcome {
    int error = 0;
    MonotonicNotification done;
  };
  const auto outcome = std::make_shared<Outcome>();
  HangDumpWriter writer;
  {
    absl::MutexLock lock(&g_mutex);
    writer = Writer();
  }
  auto thread =
      StartThread("tessera-dump", [outcome, path, text, write = writer.write] {
        outcome->error = write ? write(path, text) : WriteNew(path, text);
        outcome->done.Notify();
      });
  if (!thread.ok()) return EAGAIN;
  thread->detach();
  if (!outcome->done.WaitFor(writer.patience)) {
    return ETIMEDOUT;
  }
  return outcome->error;
}

}  // namespace

void SetHangDumpFolder(const std::string& folder) {
  absl::MutexLock lock(&g_mutex);
  Folder() = folder;
}

void SetHangDumpWriterForTesting(const HangDumpWriter& writer) {
  absl::MutexLock lock(&g_mutex);
  Writer() = writer;
}

absl::Status WithHangDump(int rank, const absl::Status& status) {
  const std::string folder = ChosenFolder();
  if (folder == "off") return status;
  const std::string path =
      absl::StrCat(absl::StripSuffix(folder, "/"), "/tessera-hang-rank", rank,
                   "-pid", getpid(), ".txt");
  const std::string text = absl::StrCat(
      absl::FormatTime(absl::Now()), ", rank ", rank, ", process ", getpid(),
      "\n", status.message(), "\n\n", FlightRecorder::AllToText(/*wait=*/true),
      "\nthe stacks of all threads:\n", AllThreadStacks());
  const int error = WriteWithPatience(path, text);
  if (error != 0) {
    TESSERA_LOG(WARNING) << "cannot write " << path << ": " << strerror(error);
    return status;
  }
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), "; rank ", rank,
                   "'s last collectives and all its stacks: ", path));
}

}  // namespace tessera
