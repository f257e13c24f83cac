// SwapRoom: tracks the free parts of a file; adjacent ones are joined. No
// torch.
//
// Threads: one at a time.
#ifndef OFFLOAD_DISK_SWAP_ROOM_H_
#define OFFLOAD_DISK_SWAP_ROOM_H_

#include <cstdint>
#include <iterator>
#include <map>

namespace tessera {

class SwapRoom {
 public:
  // The end of the file.
  int64_t end() const { return end_; }
  // Takes free bytes, first fit; false: there are none.
  bool Take(int64_t bytes, int64_t* begin) {
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second < bytes) continue;
      *begin = it->first;
      const int64_t left = it->second - bytes;
      free_.erase(it);
      if (left > 0) free_[*begin + bytes] = left;
      return true;
    }
    return false;
  }
  // Returns where the free part at the end begins, or the end.
  int64_t Tail() const {
    if (free_.empty()) return end_;
    const auto& [begin, bytes] = *free_.rbegin();
    return begin + bytes == end_ ? begin : end_;
  }
  // Adds free bytes at the end.
  void Grow(int64_t bytes) {
    end_ += bytes;
    Give(end_ - bytes, bytes);
  }
  void Give(int64_t begin, int64_t bytes) {
    auto next = free_.lower_bound(begin);
    if (next != free_.end() && begin + bytes == next->first) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == begin) {
        before->second += bytes;
        return;
      }
    }
    free_[begin] = bytes;
  }

 private:
  int64_t end_ = 0;
  std::map<int64_t, int64_t> free_;  // begin -> bytes
};

}  // namespace tessera
#endif  // OFFLOAD_DISK_SWAP_ROOM_H_
