#include "checkpoint/disk/folder.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <random>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr int kMostTurns = 16;

}  // namespace

bool IsDiskFull(const absl::Status& status) {
  if (status.ok()) return false;
  for (const int error : {ENOSPC, EDQUOT}) {
    if (absl::StrContains(status.message(), std::strerror(error))) return true;
  }
  return false;
}

OpenPath::OpenPath(FileSystem* files, int fd, std::string path)
    : files_(files), fd_(fd), path_(std::move(path)) {}

OpenPath::OpenPath(OpenPath&& other) noexcept { *this = std::move(other); }

OpenPath& OpenPath::operator=(OpenPath&& other) noexcept {
  std::swap(files_, other.files_);
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  return *this;
}

OpenPath::~OpenPath() {
  if (fd_ >= 0) files_->Close(fd_);
}

absl::Status OpenPath::Error(int64_t result, absl::string_view name) const {
  return FileError(static_cast<int>(-result),
                   name.empty() ? path_ : absl::StrCat(path_, "/", name));
}

absl::Status OpenPath::Sync() const {
  const int result = Uninterrupted([&] { return files_->Sync(fd_); });
  return result < 0 ? Error(result) : absl::OkStatus();
}

absl::StatusOr<struct stat> OpenPath::Stat() const {
  struct stat info = {};
  const int result = Uninterrupted([&] { return files_->Stat(fd_, &info); });
  if (result < 0) return Error(result);
  return info;
}

absl::Status File::WriteAt(int64_t offset, absl::string_view from) const {
  while (!from.empty()) {
    const int64_t n = Uninterrupted([&] {
      return open_.files()->Write(open_.fd(), from.data(),
                                  static_cast<int64_t>(from.size()), offset);
    });
    if (n <= 0) return open_.Error(n < 0 ? n : -EIO);
    from.remove_prefix(static_cast<size_t>(n));
    offset += n;
  }
  return absl::OkStatus();
}

absl::Status File::ReadAt(int64_t offset, char* to, int64_t bytes) const {
  while (bytes > 0) {
    const int64_t n = Uninterrupted(
        [&] { return open_.files()->Read(open_.fd(), to, bytes, offset); });
    if (n < 0) return open_.Error(n);
    if (n == 0) {
      return absl::DataLossError(absl::StrCat(path(), ": ends at byte ", offset,
                                              ", expected ", bytes, " more"));
    }
    to += n;
    offset += n;
    bytes -= n;
  }
  return absl::OkStatus();
}

absl::Status File::Lock() const {
  const absl::Status held =
      absl::AlreadyExistsError(absl::StrCat(path(), ": is locked"));
  const int result =
      Uninterrupted([&] { return open_.files()->Lock(open_.fd()); });
  if (result == -EAGAIN || result == -EACCES) return held;
  if (result < 0) return open_.Error(result);
  TESSERA_ASSIGN_OR_RETURN(const struct stat info, open_.Stat());
  // If its last holder has removed the file, others lock another file now.
  return info.st_nlink == 0 ? held : absl::OkStatus();
}

absl::StatusOr<Folder> Folder::Open(const std::string& path,
                                    FileSystem* files) {
  const int fd = Uninterrupted(
      [&] { return files->Open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY); });
  if (fd == -ENOTDIR) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": is not a folder"));
  }
  if (fd < 0) return FileError(-fd, path);
  return Folder(OpenPath(files, fd, path));
}

// The name is synced also if the folder exists: its creator may have been
// killed before syncing.
absl::StatusOr<Folder> Folder::Make(const std::string& given,
                                    FileSystem* files) {
  std::error_code error;
  std::string path = std::filesystem::absolute(given, error).string();
  if (given.empty() || error) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", given, "' cannot be the name of a folder",
                     error ? absl::StrCat(" (", error.message(), ")") : ""));
  }
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (path == "/") return Open(path, files);
  const size_t cut = path.rfind('/');
  const std::string name = path.substr(cut + 1);
  const std::string above_path = path.substr(0, std::max<size_t>(cut, 1));
  absl::StatusOr<Folder> above = Open(above_path, files);
  if (absl::IsNotFound(above.status())) above = Make(above_path, files);
  absl::StatusOr<Folder> there = Open(given, files);
  // An existing folder may lie in one that this user cannot read; then others
  // have to sync its names.
  if (there.ok() && absl::IsPermissionDenied(above.status())) return there;
  TESSERA_RETURN_IF_ERROR(Annotate(above.status(), path));
  if (!there.ok() && !absl::IsNotFound(there.status())) return there.status();
  if (!there.ok()) {
    const int result = Uninterrupted(
        [&] { return files->MakeFolder(above->open_.fd(), name); });
    if (result < 0 && result != -EEXIST) {
      return above->open_.Error(result, name);
    }
  }
  TESSERA_RETURN_IF_ERROR(above->Sync());
  return there.ok() ? std::move(there) : Open(given, files);
}

// Opening a FIFO or a device may wait or have side effects. So a descriptor of
// O_PATH, which opens nothing, holds what has the name, and is reopened if it
// is a file. The name itself may be another's by then.
absl::StatusOr<File> Folder::OpenAs(const std::string& name, int flags,
                                    bool follow) const {
  const std::string file_path = absl::StrCat(path(), "/", name);
  const absl::Status no_file = absl::FailedPreconditionError(
      absl::StrCat(file_path, ": is no regular file"));
  const int no_follow = follow ? 0 : O_NOFOLLOW;
  const int hold = Uninterrupted(
      [&] { return files()->Open(open_.fd(), name, O_PATH | no_follow); });
  if (hold < 0) return OpenError(hold, name);
  const OpenPath held(files(), hold, file_path);
  TESSERA_ASSIGN_OR_RETURN(const struct stat what, held.Stat());
  if (S_ISLNK(what.st_mode)) {
    return absl::FailedPreconditionError(absl::StrCat(
        file_path,
        ": is a symbolic link, and is not written through; put the file there "
        "that it leads to, or remove the link"));
  }
  if (!S_ISREG(what.st_mode)) return no_file;
  int fd = Uninterrupted([&] { return files()->Reopen(hold, flags); });
  if (fd == -ENOENT) {
    // Without /proc it is opened by its name, without waiting if it has
    // changed.
    fd = Uninterrupted([&] {
      return files()->Open(open_.fd(), name,
                           flags | no_follow | O_NONBLOCK | O_NOCTTY);
    });
  }
  if (fd < 0) return FileError(-fd, file_path);
  OpenPath open(files(), fd, file_path);
  // The size is that of the open file: NFS looks it up anew.
  TESSERA_ASSIGN_OR_RETURN(const struct stat info, open.Stat());
  if (!S_ISREG(info.st_mode)) return no_file;
  return File(std::move(open), info.st_size);
}

// Distinguishes a link that leads nowhere from a missing name: a caller that
// removes leftovers must not mistake a disk that is not mounted for a lost
// file.
absl::Status Folder::OpenError(int result, const std::string& name) const {
  const absl::Status error = open_.Error(result, name);
  if (result != -ENOENT && result != -ELOOP) return error;
  const int fd = Uninterrupted(
      [&] { return files()->Open(open_.fd(), name, O_PATH | O_NOFOLLOW); });
  if (fd < 0) return error;
  const OpenPath link(files(), fd, absl::StrCat(path(), "/", name));
  const absl::StatusOr<struct stat> what = link.Stat();
  if (!what.ok() || !S_ISLNK(what->st_mode)) return error;
  return absl::FailedPreconditionError(absl::StrCat(
      link.path(),
      ": is a symbolic link that leads to nothing (is a disk not mounted?)"));
}

absl::StatusOr<File> Folder::OpenFile(const std::string& name) const {
  return OpenAs(name, O_RDONLY, /*follow=*/true);
}

absl::StatusOr<File> Folder::OpenFileToWrite(const std::string& name) const {
  return OpenAs(name, O_RDWR, /*follow=*/false);
}

absl::StatusOr<File> Folder::CreateFile(const std::string& name) const {
  const int fd = Uninterrupted([&] {
    return files()->Open(open_.fd(), name, O_RDWR | O_CREAT | O_EXCL);
  });
  const std::string file_path = absl::StrCat(path(), "/", name);
  if (fd < 0) return FileError(-fd, file_path);
  return File(OpenPath(files(), fd, file_path), 0);
}

absl::StatusOr<File> Folder::OpenOrCreateFile(const std::string& name) const {
  absl::StatusOr<File> file = OpenFileToWrite(name);
  // Others may create it, or remove it, meanwhile.
  for (int i = 0; i < kMostTurns && absl::IsNotFound(file.status()); ++i) {
    file = CreateFile(name);
    if (!absl::IsAlreadyExists(file.status())) return file;
    file = OpenFileToWrite(name);
  }
  return file;
}

absl::Status Folder::Rename(const std::string& from,
                            const std::string& to) const {
  const int result =
      Uninterrupted([&] { return files()->Rename(open_.fd(), from, to); });
  return result < 0 ? open_.Error(result, to) : absl::OkStatus();
}

absl::Status Folder::Remove(const std::string& name) const {
  const int result =
      Uninterrupted([&] { return files()->Remove(open_.fd(), name); });
  return result < 0 && result != -ENOENT ? open_.Error(result, name)
                                         : absl::OkStatus();
}

absl::Status Folder::Clear(const std::string& name) const {
  const absl::Status removed = Remove(name);
  if (removed.ok()) return removed;
  if (Uninterrupted([&] { return files()->RemoveFolder(open_.fd(), name); }) ==
      0) {
    return absl::OkStatus();
  }
  const int fd = Uninterrupted([&] {
    return files()->Open(open_.fd(), name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW);
  });
  if (fd < 0) return removed;
  files()->Close(fd);
  std::random_device random;
  return Rename(name, absl::StrFormat("%s.aside-%08x", name, random()));
}

absl::StatusOr<int64_t> Folder::FreeBytes() const {
  const int64_t result =
      Uninterrupted([&] { return files()->FreeBytes(open_.fd()); });
  if (result < 0) return open_.Error(result);
  return result;
}

absl::StatusOr<std::string> Folder::Identity() const {
  TESSERA_ASSIGN_OR_RETURN(const struct stat info, open_.Stat());
  return absl::StrCat(info.st_dev, ":", info.st_ino);
}

absl::StatusOr<std::vector<std::string>> Folder::Names() const {
  std::vector<std::string> names;
  const int result =
      Uninterrupted([&] { return files()->List(open_.fd(), &names); });
  if (result < 0) return open_.Error(result);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace tessera
