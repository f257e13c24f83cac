#include "comm/record/hang_dump.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/env.h"
#include "base/log.h"
#include "base/thread_stacks.h"
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

// A new file of our own: in a shared /tmp a name may be a trap.
bool WriteNew(const std::string& path, absl::string_view text) {
  unlink(path.c_str());
  const int fd = open(
      path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (fd < 0) return false;
  bool ok = true;
  while (ok && !text.empty()) {
    const ssize_t written = write(fd, text.data(), text.size());
    if (written > 0) text.remove_prefix(written);
    ok = written > 0 || errno == EINTR;
  }
  return close(fd) == 0 && ok;
}

}  // namespace

void SetHangDumpFolder(const std::string& folder) {
  absl::MutexLock lock(&g_mutex);
  Folder() = folder;
}

std::string WriteHangDump(int rank, absl::string_view reason) {
  const std::string folder = ChosenFolder();
  if (folder == "off") return "";
  const std::string path =
      absl::StrCat(absl::StripSuffix(folder, "/"), "/tessera-hang-rank", rank,
                   "-pid", getpid(), ".txt");
  const std::string text = absl::StrCat(
      absl::FormatTime(absl::Now()), ", rank ", rank, ", process ", getpid(),
      "\n", reason, "\n\n", FlightRecorder::AllToText(/*wait=*/true),
      "\nthe stacks of all threads:\n", AllThreadStacks());
  if (WriteNew(path, text)) return path;
  TESSERA_LOG(WARNING) << "cannot write " << path << ": " << strerror(errno);
  return "";
}

absl::Status WithHangDump(int rank, const absl::Status& status) {
  const std::string path = WriteHangDump(rank, status.message());
  if (path.empty()) return status;
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(), "; rank ", rank,
                   "'s last collectives and all its stacks: ", path));
}

}  // namespace tessera
