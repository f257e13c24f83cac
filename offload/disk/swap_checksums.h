// SwapChecksums: checksums of blocks as they were written, by their place in a
// file. No torch.
//
// Threads: any.
#ifndef OFFLOAD_DISK_SWAP_CHECKSUMS_H_
#define OFFLOAD_DISK_SWAP_CHECKSUMS_H_

#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "base/crc32c.h"

namespace tessera {

class SwapChecksums {
 public:
  // Returns the CRC32C of the bytes.
  static uint32_t Of(const char* data, int64_t bytes) {
    return Crc32c({data, static_cast<size_t>(bytes)});
  }

  // Forgets the checksums of all blocks that overlap this part of the file.
  void Forget(int64_t begin, int64_t bytes) {
    absl::MutexLock lock(&mutex_);
    auto it = sums_.lower_bound(begin);
    if (it != sums_.begin()) {
      const auto before = std::prev(it);
      if (before->first + before->second.bytes > begin) it = before;
    }
    while (it != sums_.end() && it->first < begin + bytes) it = sums_.erase(it);
  }
  void Put(int64_t begin, int64_t bytes, uint32_t crc) {
    absl::MutexLock lock(&mutex_);
    sums_[begin] = {bytes, crc};
  }
  // Returns where the first block in [begin, begin + bytes) of the file begins
  // that `memory` does not match; -1: none. Blocks for which
  // `looks_at(block_begin, block_end)` is false are skipped.
  template <class Fn>
  int64_t FirstWrong(int64_t begin, int64_t bytes, const char* memory,
                     const Fn& looks_at) {
    std::vector<std::pair<int64_t, Sum>> found;
    {
      absl::MutexLock lock(&mutex_);
      for (auto it = sums_.lower_bound(begin);
           it != sums_.end() && it->first + it->second.bytes <= begin + bytes;
           ++it) {
        if (looks_at(it->first, it->first + it->second.bytes)) {
          found.push_back(*it);
        }
      }
    }
    for (const auto& [at, sum] : found) {
      if (Of(memory + (at - begin), sum.bytes) != sum.crc) return at;
    }
    return -1;
  }

 private:
  struct Sum {
    int64_t bytes;
    uint32_t crc;
  };
  absl::Mutex mutex_;
  std::map<int64_t, Sum> sums_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // OFFLOAD_DISK_SWAP_CHECKSUMS_H_
