#include "offload/disk/swap_folder.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace tessera {
namespace {

constexpr char kPrefix[] = "tessera-swap-";
constexpr size_t kRandomLetters = 6;
constexpr int kNamesTried = 100;
// A job takes microseconds from open to unlink; younger ones may be on the way.
constexpr int64_t kAbandonedAfterSeconds = 60;

std::string RandomName() {
  constexpr char kLetters[] = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::uniform_int_distribution<size_t> letter(0, sizeof(kLetters) - 2);
  std::string name = kPrefix;
  for (size_t i = 0; i < kRandomLetters; ++i) name += kLetters[letter(random)];
  return name;
}

bool IsSwapName(absl::string_view name) {
  if (!absl::StartsWith(name, kPrefix)) return false;
  name.remove_prefix(sizeof(kPrefix) - 1);
  return name.size() == kRandomLetters &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return absl::ascii_isalnum(static_cast<unsigned char>(c));
         });
}

absl::Status FolderError(absl::string_view owner, const std::string& folder,
                         absl::string_view doing, int error) {
  return absl::Status(
      absl::ErrnoToStatusCode(error),
      absl::StrCat("[", owner, "] ", doing, " the folder ", folder,
                   " for the swap file failed: ", std::strerror(error),
                   "; create it on a local disk and let this user write there, "
                   "or set nvme_path to another folder"));
}

// What a file's clock says is compared with that of the file system's own: of
// `now`, a file just made.
void RemoveIfAbandoned(FileSystem* files, int folder, const std::string& name,
                       const struct stat& now) {
  const int fd =
      files->Open(folder, name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return;
  struct stat info = {};
  if (files->Stat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
      info.st_uid == now.st_uid &&
      info.st_mtim.tv_sec + kAbandonedAfterSeconds < now.st_mtim.tv_sec &&
      files->Lock(fd) == 0) {
    (void)files->Remove(folder, name);
  }
  files->Close(fd);
}

void Sweep(FileSystem* files, int folder, int fd) {
  struct stat now = {};
  std::vector<std::string> names;
  if (files->Stat(fd, &now) != 0 || files->List(folder, &names) != 0) return;
  for (const std::string& name : names) {
    if (IsSwapName(name)) RemoveIfAbandoned(files, folder, name, now);
  }
}

// The descriptor of a new file, or -errno.
int Make(FileSystem* files, int folder, int flags, std::string* name) {
  for (int i = 0; i < kNamesTried; ++i) {
    *name = RandomName();
    const int fd =
        files->Open(folder, *name, O_CREAT | O_EXCL | O_RDWR | flags);
    if (fd != -EEXIST && fd != -EINTR) return fd;
  }
  return -EEXIST;
}

}  // namespace

absl::StatusOr<OpenedSwap> OpenSwap(FileSystem* files,
                                    const std::string& folder,
                                    absl::string_view owner) {
  const int at = files->Open(AT_FDCWD, folder, O_RDONLY | O_DIRECTORY);
  if (at < 0) return FolderError(owner, folder, "opening", -at);
  const auto closer = absl::MakeCleanup([&] { files->Close(at); });
  OpenedSwap opened;
  std::string name;
  opened.fd = Make(files, at, O_DIRECT, &name);
  opened.direct = opened.fd >= 0;
  if (opened.fd == -EINVAL) {
    // Some systems make the file before they see that they know no O_DIRECT.
    (void)files->Remove(at, name);
    opened.fd = Make(files, at, 0, &name);
  }
  if (opened.fd < 0) {
    return FolderError(owner, folder, "making a file in", -opened.fd);
  }
  // Only for others' sweep, and without it the file's age still is.
  (void)files->Lock(opened.fd);
  const int gone = files->Remove(at, name);
  if (gone < 0 && gone != -ENOENT) {
    files->Close(opened.fd);
    return FolderError(owner, folder, "removing a name from", -gone);
  }
  Sweep(files, at, opened.fd);
  return opened;
}

}  // namespace tessera
