#include "checkpoint/disk/folder.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"

namespace tessera {

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
  int result = 0;
  do {
    result = files_->Sync(fd_);
  } while (result == -EINTR);
  return result < 0 ? Error(result) : absl::OkStatus();
}

absl::Status File::WriteAt(int64_t offset, absl::string_view from) const {
  while (!from.empty()) {
    const int64_t n = open_.files()->Write(
        open_.fd(), from.data(), static_cast<int64_t>(from.size()), offset);
    if (n == -EINTR) continue;
    if (n <= 0) return open_.Error(n < 0 ? n : -EIO);
    from.remove_prefix(static_cast<size_t>(n));
    offset += n;
  }
  return absl::OkStatus();
}

absl::Status File::ReadAt(int64_t offset, char* to, int64_t bytes) const {
  while (bytes > 0) {
    const int64_t n = open_.files()->Read(open_.fd(), to, bytes, offset);
    if (n == -EINTR) continue;
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
  int result = 0;
  do {
    result = open_.files()->Lock(open_.fd());
  } while (result == -EINTR);
  if (result == -EAGAIN || result == -EACCES) return held;
  struct stat info = {};
  if (result >= 0) result = open_.files()->Stat(open_.fd(), &info);
  if (result < 0) return open_.Error(result);
  // Its last holder has removed it: others lock another file now.
  return info.st_nlink == 0 ? held : absl::OkStatus();
}

absl::StatusOr<Folder> Folder::Open(const std::string& path,
                                    FileSystem* files) {
  const int fd = files->Open(AT_FDCWD, path, O_RDONLY | O_DIRECTORY);
  if (fd == -ENOTDIR) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": is no folder"));
  }
  if (fd < 0) return FileError(-fd, path);
  return Folder(OpenPath(files, fd, path));
}

// The name is synced also where the folder is there: who made it may have been
// killed before.
absl::StatusOr<Folder> Folder::Make(const std::string& given,
                                    FileSystem* files) {
  std::string path = std::filesystem::absolute(given).string();
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  if (path == "/") return Open(path, files);
  const size_t cut = path.rfind('/');
  const std::string name = path.substr(cut + 1);
  const std::string above_path = path.substr(0, std::max<size_t>(cut, 1));
  absl::StatusOr<Folder> above = Open(above_path, files);
  if (absl::IsNotFound(above.status())) above = Make(above_path, files);
  absl::StatusOr<Folder> there = Open(given, files);
  // One that is there may lie in a folder that this user cannot read, whose
  // names are then another's to sync.
  if (there.ok() && absl::IsPermissionDenied(above.status())) return there;
  TESSERA_RETURN_IF_ERROR(Annotate(above.status(), path));
  if (absl::IsNotFound(there.status())) {
    const int result = files->MakeFolder(above->open_.fd(), name);
    if (result < 0 && result != -EEXIST) {
      return above->open_.Error(result, name);
    }
  }
  TESSERA_RETURN_IF_ERROR(above->Sync());
  return Open(given, files);
}

absl::StatusOr<File> Folder::OpenAs(const std::string& name, int flags) const {
  // Without O_NONBLOCK a FIFO would wait for its other end.
  const int fd = files()->Open(open_.fd(), name,
                               flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY);
  const std::string file_path = absl::StrCat(path(), "/", name);
  const absl::Status no_file = absl::FailedPreconditionError(
      absl::StrCat(file_path, ": is no regular file"));
  if (fd == -ELOOP || fd == -EISDIR || fd == -ENXIO) return no_file;
  if (fd < 0) return FileError(-fd, file_path);
  OpenPath open(files(), fd, file_path);
  struct stat info = {};
  const int result = files()->Stat(fd, &info);
  if (result < 0) return open.Error(result);
  if (!S_ISREG(info.st_mode)) return no_file;
  return File(std::move(open), info.st_size);
}

absl::StatusOr<File> Folder::OpenFile(const std::string& name) const {
  return OpenAs(name, O_RDONLY);
}

absl::StatusOr<File> Folder::OpenFileToWrite(const std::string& name) const {
  return OpenAs(name, O_RDWR);
}

absl::StatusOr<File> Folder::CreateFile(const std::string& name) const {
  return OpenAs(name, O_RDWR | O_CREAT | O_EXCL);
}

absl::StatusOr<File> Folder::OpenOrCreateFile(const std::string& name) const {
  return OpenAs(name, O_RDWR | O_CREAT);
}

absl::Status Folder::Rename(const std::string& from,
                            const std::string& to) const {
  const int result = files()->Rename(open_.fd(), from, to);
  return result < 0 ? open_.Error(result, to) : absl::OkStatus();
}

absl::Status Folder::Remove(const std::string& name) const {
  const int result = files()->Remove(open_.fd(), name);
  return result < 0 && result != -ENOENT ? open_.Error(result, name)
                                         : absl::OkStatus();
}

absl::StatusOr<std::string> Folder::Identity() const {
  struct stat info = {};
  const int result = files()->Stat(open_.fd(), &info);
  if (result < 0) return open_.Error(result);
  return absl::StrCat(info.st_dev, ":", info.st_ino);
}

absl::StatusOr<std::vector<std::string>> Folder::Names() const {
  std::vector<std::string> names;
  const int result = files()->List(open_.fd(), &names);
  if (result < 0) return open_.Error(result);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace tessera
