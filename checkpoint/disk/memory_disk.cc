#include "checkpoint/disk/memory_disk.h"

#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "absl/strings/str_split.h"

namespace tessera {
namespace {

constexpr size_t kSector = 512;

}  // namespace

MemoryDisk::MemoryDisk() : root_(std::make_shared<Node>()) {
  root_->folder = true;
}

// Returns what a power failure leaves of a file. A sector is written whole or
// not at all. Writes to one sector are not mixed, but any of them may be the
// last that the disk has received. A length that was kept without its bytes has
// zeros there.
std::string MemoryDisk::Kept(const Node& file, const Keeps& keeps) {
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
MemoryDisk::NodePtr MemoryDisk::CopyOf(const NodePtr& node, const Keeps& keeps,
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

std::unique_ptr<MemoryDisk> MemoryDisk::AfterPowerFailure(
    const Keeps& keeps) const {
  auto disk = std::make_unique<MemoryDisk>();
  std::map<const Node*, NodePtr> copies;
  disk->root_ = CopyOf(root_, keeps, &copies);
  return disk;
}

int64_t MemoryDisk::Ask(const char* call) {
  const int64_t k = calls_++;
  return before ? before(k, call) : 0;
}

// Returns the folder of `name`, and sets `last` to the last part of the name.
MemoryDisk::Node* MemoryDisk::FolderOf(int folder, const std::string& name,
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

MemoryDisk::NodePtr MemoryDisk::Find(int folder, const std::string& name) {
  std::string last;
  Node* const in = FolderOf(folder, name, &last);
  if (in == nullptr) return nullptr;
  if (last.empty()) return root_;
  const auto it = in->entries.find(last);
  return it == in->entries.end() ? nullptr : it->second;
}

int MemoryDisk::Open(int folder, const std::string& name, int flags) {
  const int64_t told = Ask("open");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return static_cast<int>(told);
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

int MemoryDisk::Reopen(int fd, int) {
  const int64_t told = Ask("reopen");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return static_cast<int>(told);
  open_[next_fd_] = open_.at(fd);
  return next_fd_++;
}

void MemoryDisk::Close(int fd) {
  absl::MutexLock lock(&mutex_);
  const auto it = open_.find(fd);
  if (it == open_.end()) return;
  if (it->second->locked_by == fd) it->second->locked_by = -1;
  open_.erase(it);
}

// Counts files that are open and have no name any more, too.
int64_t MemoryDisk::Filled() const {
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

int64_t MemoryDisk::FreeBytes(int) {
  const int64_t told = Ask("statvfs");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return told;
  return capacity < 0 ? int64_t{1} << 60
                      : std::max<int64_t>(0, capacity - Filled());
}

int64_t MemoryDisk::Write(int fd, const char* from, int64_t bytes,
                          int64_t offset) {
  const int64_t told = Ask("write");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return told;
  if (told > 0) bytes = std::min(bytes, told);
  Node& node = *open_.at(fd);
  if (capacity >= 0) {
    const auto size = static_cast<int64_t>(node.bytes.size());
    bytes = std::min(bytes,
                     size + std::max<int64_t>(0, capacity - Filled()) - offset);
    if (bytes <= 0) return -ENOSPC;
  }
  node.unsynced.emplace_back(offset, std::string(from, from + bytes));
  std::string& all = node.bytes;
  all.resize(std::max(all.size(), static_cast<size_t>(offset + bytes)));
  std::memcpy(&all[static_cast<size_t>(offset)], from,
              static_cast<size_t>(bytes));
  return bytes;
}

int64_t MemoryDisk::Read(int fd, char* to, int64_t bytes, int64_t offset) {
  const int64_t told = Ask("read");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return told;
  if (told > 0) bytes = std::min(bytes, told);
  const std::string& all = open_.at(fd)->bytes;
  bytes = std::min<int64_t>(
      bytes, std::max<int64_t>(0, static_cast<int64_t>(all.size()) - offset));
  std::copy_n(all.begin() + offset, bytes, to);
  return bytes;
}

int MemoryDisk::Sync(int fd) {
  const int64_t told = Ask("sync");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return static_cast<int>(told);
  Node& node = *open_.at(fd);
  node.synced_bytes = node.bytes;
  node.unsynced.clear();
  node.synced_entries = node.entries;
  return 0;
}

int MemoryDisk::Stat(int fd, struct stat* info) {
  const int64_t told = Ask("stat");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return static_cast<int>(told);
  const Node& node = *open_.at(fd);
  *info = {};
  info->st_mode = node.folder ? S_IFDIR : S_IFREG;
  info->st_size = static_cast<off_t>(node.bytes.size());
  info->st_nlink = static_cast<nlink_t>(node.links);
  return 0;
}

int MemoryDisk::Rename(int folder, const std::string& from,
                       const std::string& to) {
  const int64_t told = Ask("rename");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return static_cast<int>(told);
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

int MemoryDisk::Remove(int folder, const std::string& name) {
  const int64_t told = Ask("remove");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return static_cast<int>(told);
  std::string last;
  Node* const in = FolderOf(folder, name, &last);
  if (in == nullptr || in->entries.count(last) == 0) return -ENOENT;
  if (in->entries[last]->folder) return -EISDIR;
  in->entries[last]->links = 0;
  in->entries.erase(last);
  return 0;
}

int MemoryDisk::MakeFolder(int folder, const std::string& name) {
  const int64_t told = Ask("mkdir");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return static_cast<int>(told);
  std::string last;
  Node* const in = FolderOf(folder, name, &last);
  if (in == nullptr || last.empty()) return -ENOENT;
  if (in->entries.count(last) > 0) return -EEXIST;
  in->entries[last] = std::make_shared<Node>();
  in->entries[last]->folder = true;
  return 0;
}

int MemoryDisk::RemoveFolder(int folder, const std::string& name) {
  const int64_t told = Ask("rmdir");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return static_cast<int>(told);
  std::string last;
  Node* const in = FolderOf(folder, name, &last);
  if (in == nullptr || in->entries.count(last) == 0) return -ENOENT;
  if (!in->entries[last]->folder) return -ENOTDIR;
  if (!in->entries[last]->entries.empty()) return -ENOTEMPTY;
  in->entries.erase(last);
  return 0;
}

int MemoryDisk::List(int folder, std::vector<std::string>* names) {
  const int64_t told = Ask("list");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return static_cast<int>(told);
  names->clear();
  for (const auto& [name, node] : open_.at(folder)->entries) {
    names->push_back(name);
  }
  return 0;
}

int MemoryDisk::Lock(int fd) {
  const int64_t told = Ask("lock");
  absl::MutexLock lock(&mutex_);
  if (told < 0) return static_cast<int>(told);
  int& holder = open_.at(fd)->locked_by;
  if (holder >= 0 && holder != fd) return -EAGAIN;
  holder = fd;
  return 0;
}

std::map<std::string, std::string> MemoryDisk::FilesIn(
    const std::string& path) {
  absl::MutexLock lock(&mutex_);
  std::map<std::string, std::string> files;
  const NodePtr folder = Find(AT_FDCWD, path);
  if (folder == nullptr) return files;
  for (const auto& [name, node] : folder->entries) files[name] = node->bytes;
  return files;
}

}  // namespace tessera
