#include "comm/rendezvous/store_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "comm/connect/private_file.h"

namespace tessera {
namespace {

// A rank that ends may delete it again and again.
constexpr int kTries = 100;

absl::Status Failed(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

}  // namespace

absl::Status ClaimStoreFile(const std::string& path) {
  // The store would try to open it for minutes.
  const std::string folder = std::filesystem::absolute(path).parent_path();
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    return Failed(absl::StrCat("cannot write to folder ", folder));
  }
  for (int i = 0; i < kTries; ++i) {
    const int fd =
        open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0 && errno != EEXIST) return Failed("cannot make the file");
    if (fd >= 0) close(fd);
    struct stat file;
    if (lstat(path.c_str(), &file) != 0) {
      if (errno == ENOENT) continue;
      return Failed("cannot look at the file");
    }
    const std::string fault = WhyNotPrivate(file);
    if (fault.empty()) return absl::OkStatus();
    return absl::PermissionDeniedError(
        absl::StrCat("refused: ", fault,
                     "; expected no file, or one for this user alone: delete "
                     "it, give another path, or meet at tcp://host:port"));
  }
  return absl::UnavailableError("the file is deleted again and again");
}

}  // namespace tessera
