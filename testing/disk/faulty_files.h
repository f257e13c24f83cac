// FaultyFiles passes calls on to another FileSystem, except those that a test
// refuses or cuts short. For tests.
//
//   FaultyFiles files(FileSystem::Real());
//   files.before = [](int64_t k, const char*) { return k == 7 ? -ENOSPC : 0; };
//
// Threads: any.
#ifndef TESTING_DISK_FAULTY_FILES_H_
#define TESTING_DISK_FAULTY_FILES_H_

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/disk/disk_ring.h"
#include "base/disk/file_system.h"

namespace tessera {

class FaultyFiles : public FileSystem {
 public:
  explicit FaultyFiles(FileSystem* under) : under_(under) {}

  // Returns the number of calls so far; Close, StartSync and requests of a ring
  // do not count.
  int64_t calls() const { return calls_; }
  // Runs before call number k, counted from 0, does anything; it may make calls
  // itself. It returns -errno to refuse the call, or 0. A read or write that
  // gets a positive number moves so many bytes at most.
  std::function<int64_t(int64_t k, const char* call)> before;
  // Receives the result of a read or write, of a ring, too; the returned value
  // replaces it.
  std::function<int64_t(bool write, int64_t offset, int64_t result)> answer;

  int Open(int folder, const std::string& name, int flags) override {
    return Call("open", [&] { return under_->Open(folder, name, flags); });
  }
  int Reopen(int fd, int flags) override {
    return Call("reopen", [&] { return under_->Reopen(fd, flags); });
  }
  void Close(int fd) override { under_->Close(fd); }
  int64_t Write(int fd, const char* from, int64_t bytes,
                int64_t offset) override {
    return Move("write", bytes, offset, [&](int64_t most) {
      return under_->Write(fd, from, most, offset);
    });
  }
  int64_t Read(int fd, char* to, int64_t bytes, int64_t offset) override {
    return Move("read", bytes, offset, [&](int64_t most) {
      return under_->Read(fd, to, most, offset);
    });
  }
  int Sync(int fd) override {
    return Call("sync", [&] { return under_->Sync(fd); });
  }
  int Allocate(int fd, int64_t begin, int64_t bytes) override {
    return Call("allocate", [&] { return under_->Allocate(fd, begin, bytes); });
  }
  int Truncate(int fd, int64_t bytes) override {
    return Call("truncate", [&] { return under_->Truncate(fd, bytes); });
  }
  void StartSync(int fd, int64_t begin, int64_t bytes) override {
    under_->StartSync(fd, begin, bytes);
  }
  int Stat(int fd, struct stat* info) override {
    return Call("stat", [&] { return under_->Stat(fd, info); });
  }
  int Rename(int folder, const std::string& from,
             const std::string& to) override {
    return Call("rename", [&] { return under_->Rename(folder, from, to); });
  }
  int Remove(int folder, const std::string& name) override {
    return Call("remove", [&] { return under_->Remove(folder, name); });
  }
  int MakeFolder(int folder, const std::string& name) override {
    return Call("mkdir", [&] { return under_->MakeFolder(folder, name); });
  }
  int RemoveFolder(int folder, const std::string& name) override {
    return Call("rmdir", [&] { return under_->RemoveFolder(folder, name); });
  }
  int List(int folder, std::vector<std::string>* names) override {
    return Call("list", [&] { return under_->List(folder, names); });
  }
  int64_t FreeBytes(int folder) override {
    return Call("statvfs", [&] { return under_->FreeBytes(folder); });
  }
  int Lock(int fd) override {
    return Call("lock", [&] { return under_->Lock(fd); });
  }
  std::unique_ptr<DiskRing> MakeRing(unsigned depth) override {
    return under_->MakeRing(depth);
  }
  int64_t Completed(bool write, int64_t offset, int64_t result) override {
    return answer ? answer(write, offset, result) : result;
  }

 protected:
  // Calls `before`, and `after` when the call has been made.
  virtual int64_t Ask(const char* call) {
    const int64_t k = calls_++;
    return before ? before(k, call) : 0;
  }
  virtual void After() {}

 private:
  template <class Work>
  auto Call(const char* call, const Work& work) -> decltype(work()) {
    const int64_t told = Ask(call);
    if (told < 0) return static_cast<decltype(work())>(told);
    const auto result = work();
    After();
    return result;
  }
  template <class Work>
  int64_t Move(const char* call, int64_t bytes, int64_t offset,
               const Work& work) {
    const int64_t told = Ask(call);
    if (told < 0) return told;
    const int64_t result = work(told > 0 ? std::min(told, bytes) : bytes);
    After();
    return Completed(call[0] == 'w', offset, result);
  }

  FileSystem* const under_;
  std::atomic<int64_t> calls_{0};
};

}  // namespace tessera
#endif  // TESTING_DISK_FAULTY_FILES_H_
