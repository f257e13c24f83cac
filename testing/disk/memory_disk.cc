#include "testing/disk/memory_disk.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "base/disk/disk_ring.h"

namespace tessera {
namespace {

constexpr size_t kSector = 512;

}  // namespace

class MemoryDisk::Files : public FileSystem {
 public:
  Files() : root_(std::make_shared<Node>()) { root_->folder = true; }

  int Open(int folder, const std::string& name, int flags) override;
  int Reopen(int fd, int flags) override;
  void Close(int fd) override;
  int64_t Write(int fd, const char* from, int64_t bytes,
                int64_t offset) override;
  int64_t Read(int fd, char* to, int64_t bytes, int64_t offset) override;
  int Sync(int fd) override;
  void StartSync(int, int64_t, int64_t bytes) override { started += bytes; }
  int Stat(int fd, struct stat* info) override;
  int Rename(int folder, const std::string& from,
             const std::string& to) override;
  int Remove(int folder, const std::string& name) override;
  int MakeFolder(int folder, const std::string& name) override;
  int RemoveFolder(int folder, const std::string& name) override;
  int List(int folder, std::vector<std::string>* names) override;
  int Lock(int fd) override;
  int64_t FreeBytes(int folder) override;
  std::unique_ptr<DiskRing> MakeRing(unsigned) override { return nullptr; }

  // They do what MemoryDisk's do.
  std::unique_ptr<Files> AfterPowerFailure(const Keeps& keeps) const;
  std::map<std::string, std::string> FilesIn(const std::string& path);

  const int64_t* capacity = nullptr;  // MemoryDisk's
  std::atomic<int64_t> started{0};

 private:
  struct Node {
    bool folder = false;
    std::string bytes, synced_bytes;
    std::vector<std::pair<size_t, std::string>> unsynced;  // from an offset on
    std::map<std::string, std::shared_ptr<Node>> entries, synced_entries;
    int links = 1;
    int locked_by = -1;  // descriptor
  };
  using NodePtr = std::shared_ptr<Node>;

  Node* FolderOf(int folder, const std::string& name, std::string* last);
  int64_t Filled() const;
  NodePtr Find(int folder, const std::string& name);
  static std::string Kept(const Node& file, const Keeps& keeps);
  static NodePtr CopyOf(const NodePtr& node, const Keeps& keeps,
                        std::map<const Node*, NodePtr>* copies);

  absl::Mutex mutex_;
  NodePtr root_;
  std::map<int, NodePtr> open_;
  int next_fd_ = 1000;
};

// Returns what a power failure leaves of a file. A sector is written whole or
// not at all. Writes to one sector are not mixed, but any of them may be the
// last that the disk has received. A length that was kept without its bytes has
// zeros there.
std::string MemoryDisk::Files::Kept(const Node& file, const Keeps& keeps) {
  std::string kept = file.synced_bytes;
  if (file.unsynced.empty()) return kept;
  if (keeps(false)) kept.resize(file.bytes.size());
  for (const auto& [offset, written] : file.unsynced) {
    const size_t end = offset + written.size();
    for (size_t at = offset; at < end;) {
      const size_t stop = std::min(end, (at / kSector + 1) * kSector);
      if (keeps(false)) {
        kept.resize(std::max(kept.size(), stop));
        written.copy(&kept[at], stop - at, at - offset);
      }
      at = stop;
    }
  }
  return kept;
}

// A file has one copy, however many names lead to it.
MemoryDisk::Files::NodePtr MemoryDisk::Files::CopyOf(
    const NodePtr& node, const Keeps& keeps,
    std::map<const Node*, NodePtr>* copies) {
  NodePtr& copy = (*copies)[node.get()];
  if (copy != nullptr) return copy;
  copy = std::make_shared<Node>();
  const NodePtr result = copy;
  result->folder = node->folder;
  result->bytes = Kept(*node, keeps);
  result->synced_bytes = result->bytes;
  std::map<std::string, std::pair<NodePtr, NodePtr>> names;  // now, synced
  for (const auto& [name, entry] : node->entries) names[name].first = entry;
  for (const auto& [name, entry] : node->synced_entries) {
    names[name].second = entry;
  }
  for (const auto& [name, entry] : names) {
    const auto& [now, synced] = entry;
    const NodePtr& left = now == synced || keeps(true) ? now : synced;
    if (left != nullptr) result->entries[name] = CopyOf(left, keeps, copies);
  }
  result->synced_entries = result->entries;
  return result;
}

std::unique_ptr<MemoryDisk::Files> MemoryDisk::Files::AfterPowerFailure(
    const Keeps& keeps) const {
  auto disk = std::make_unique<Files>();
  std::map<const Node*, NodePtr> copies;
  disk->root_ = CopyOf(root_, keeps, &copies);
  return disk;
}

// Returns the folder of `name`, and sets `last` to the last part of the name.
MemoryDisk::Files::Node* MemoryDisk::Files::FolderOf(int folder,
                                                     const std::string& name,
                                                     std::string* last) {
  NodePtr at = root_;
  if (folder != AT_FDCWD && name.substr(0, 1) != "/") {
    const auto it = open_.find(folder);
    at = it == open_.end() ? nullptr : it->second;
  }
  const std::vector<std::string> words =
      absl::StrSplit(name, '/', absl::SkipEmpty());
  *last = words.empty() ? "" : words.back();
  for (size_t i = 0; at != nullptr && i + 1 < words.size(); ++i) {
    const auto it = at->entries.find(words[i]);
    at = it == at->entries.end() ? nullptr : it->second;
  }
  return at.get();
}

MemoryDisk::Files::NodePtr MemoryDisk::Files::Find(int folder,
                                                   const std::string& name) {
  std::string last;
  Node* const in = FolderOf(folder, name, &last);
  if (in == nullptr) return nullptr;
  if (last.empty()) return root_;
  const auto it = in->entries.find(last);
  return it == in->entries.end() ? nullptr : it->second;
}

int MemoryDisk::Files::Open(int folder, const std::string& name, int flags) {
  absl::MutexLock lock(&mutex_);
  NodePtr node = Find(folder, name);
  if (node == nullptr) {
    std::string last;
    Node* const in = FolderOf(folder, name, &last);
    if ((flags & O_CREAT) == 0 || in == nullptr) return -ENOENT;
    node = in->entries[last] = std::make_shared<Node>();
  } else if ((flags & O_CREAT) != 0 && (flags & O_EXCL) != 0) {
    return -EEXIST;
  }
  if ((flags & O_DIRECTORY) != 0 && !node->folder) return -ENOTDIR;
  open_[next_fd_] = std::move(node);
  return next_fd_++;
}

int MemoryDisk::Files::Reopen(int fd, int) {
  absl::MutexLock lock(&mutex_);
  open_[next_fd_] = open_.at(fd);
  return next_fd_++;
}

void MemoryDisk::Files::Close(int fd) {
  absl::MutexLock lock(&mutex_);
  const auto it = open_.find(fd);
  if (it == open_.end()) return;
  if (it->second->locked_by == fd) it->second->locked_by = -1;
  open_.erase(it);
}

// Counts files that are open and have no name any more, too.
int64_t MemoryDisk::Files::Filled() const {
  std::set<const Node*> nodes;
  std::vector<const Node*> left = {root_.get()};
  for (const auto& [fd, node] : open_) left.push_back(node.get());
  int64_t bytes = 0;
  while (!left.empty()) {
    const Node* const node = left.back();
    left.pop_back();
    if (!nodes.insert(node).second) continue;
    bytes += static_cast<int64_t>(node->bytes.size());
    for (const auto& [name, entry] : node->entries) left.push_back(entry.get());
  }
  return bytes;
}

int64_t MemoryDisk::Files::FreeBytes(int) {
  absl::MutexLock lock(&mutex_);
  return *capacity < 0 ? int64_t{1} << 60
                       : std::max<int64_t>(0, *capacity - Filled());
}

int64_t MemoryDisk::Files::Write(int fd, const char* from, int64_t bytes,
                                 int64_t offset) {
  absl::MutexLock lock(&mutex_);
  Node& node = *open_.at(fd);
  if (*capacity >= 0) {
    const auto size = static_cast<int64_t>(node.bytes.size());
    bytes = std::min(
        bytes, size + std::max<int64_t>(0, *capacity - Filled()) - offset);
    if (bytes <= 0) return -ENOSPC;
  }
  node.unsynced.emplace_back(offset, std::string(from, from + bytes));
  std::string& all = node.bytes;
  all.resize(std::max(all.size(), static_cast<size_t>(offset + bytes)));
  std::memcpy(&all[static_cast<size_t>(offset)], from,
              static_cast<size_t>(bytes));
  return bytes;
}

int64_t MemoryDisk::Files::Read(int fd, char* to, int64_t bytes,
                                int64_t offset) {
  absl::MutexLock lock(&mutex_);
  const std::string& all = open_.at(fd)->bytes;
  bytes = std::min<int64_t>(
      bytes, std::max<int64_t>(0, static_cast<int64_t>(all.size()) - offset));
  std::copy_n(all.begin() + offset, bytes, to);
  return bytes;
}

int MemoryDisk::Files::Sync(int fd) {
  absl::MutexLock lock(&mutex_);
  Node& node = *open_.at(fd);
  node.synced_bytes = node.bytes;
  node.unsynced.clear();
  node.synced_entries = node.entries;
  return 0;
}

int MemoryDisk::Files::Stat(int fd, struct stat* info) {
  absl::MutexLock lock(&mutex_);
  const Node& node = *open_.at(fd);
  *info = {};
  info->st_mode = node.folder ? S_IFDIR : S_IFREG;
  info->st_size = static_cast<off_t>(node.bytes.size());
  info->st_nlink = static_cast<nlink_t>(node.links);
  return 0;
}

int MemoryDisk::Files::Rename(int folder, const std::string& from,
                              const std::string& to) {
  absl::MutexLock lock(&mutex_);
  std::string old_name, new_name;
  Node* const old_in = FolderOf(folder, from, &old_name);
  Node* const new_in = FolderOf(folder, to, &new_name);
  if (old_in == nullptr || new_in == nullptr ||
      old_in->entries.count(old_name) == 0) {
    return -ENOENT;
  }
  const auto there = new_in->entries.find(new_name);
  if (there != new_in->entries.end() && there->second->folder) return -EISDIR;
  new_in->entries[new_name] = old_in->entries[old_name];
  old_in->entries.erase(old_name);
  return 0;
}

int MemoryDisk::Files::Remove(int folder, const std::string& name) {
  absl::MutexLock lock(&mutex_);
  std::string last;
  Node* const in = FolderOf(folder, name, &last);
  if (in == nullptr || in->entries.count(last) == 0) return -ENOENT;
  if (in->entries[last]->folder) return -EISDIR;
  in->entries[last]->links = 0;
  in->entries.erase(last);
  return 0;
}

int MemoryDisk::Files::MakeFolder(int folder, const std::string& name) {
  absl::MutexLock lock(&mutex_);
  std::string last;
  Node* const in = FolderOf(folder, name, &last);
  if (in == nullptr || last.empty()) return -ENOENT;
  if (in->entries.count(last) > 0) return -EEXIST;
  in->entries[last] = std::make_shared<Node>();
  in->entries[last]->folder = true;
  return 0;
}

int MemoryDisk::Files::RemoveFolder(int folder, const std::string& name) {
  absl::MutexLock lock(&mutex_);
  std::string last;
  Node* const in = FolderOf(folder, name, &last);
  if (in == nullptr || in->entries.count(last) == 0) return -ENOENT;
  if (!in->entries[last]->folder) return -ENOTDIR;
  if (!in->entries[last]->entries.empty()) return -ENOTEMPTY;
  in->entries.erase(last);
  return 0;
}

int MemoryDisk::Files::List(int folder, std::vector<std::string>* names) {
  absl::MutexLock lock(&mutex_);
  names->clear();
  for (const auto& [name, node] : open_.at(folder)->entries) {
    names->push_back(name);
  }
  return 0;
}

int MemoryDisk::Files::Lock(int fd) {
  absl::MutexLock lock(&mutex_);
  int& holder = open_.at(fd)->locked_by;
  if (holder >= 0 && holder != fd) return -EAGAIN;
  holder = fd;
  return 0;
}

std::map<std::string, std::string> MemoryDisk::Files::FilesIn(
    const std::string& path) {
  absl::MutexLock lock(&mutex_);
  std::map<std::string, std::string> files;
  const NodePtr folder = Find(AT_FDCWD, path);
  if (folder == nullptr) return files;
  for (const auto& [name, node] : folder->entries) files[name] = node->bytes;
  return files;
}

MemoryDisk::MemoryDisk() : MemoryDisk(std::make_unique<Files>()) {}

MemoryDisk::MemoryDisk(std::unique_ptr<Files> files)
    : FaultyFiles(files.get()), files_(std::move(files)) {
  files_->capacity = &capacity;
}

MemoryDisk::~MemoryDisk() = default;

std::unique_ptr<MemoryDisk> MemoryDisk::AfterPowerFailure(
    const Keeps& keeps) const {
  return std::unique_ptr<MemoryDisk>(
      new MemoryDisk(files_->AfterPowerFailure(keeps)));
}

int64_t MemoryDisk::started_bytes() const { return files_->started; }

std::map<std::string, std::string> MemoryDisk::FilesIn(
    const std::string& path) {
  return files_->FilesIn(path);
}

}  // namespace tessera
