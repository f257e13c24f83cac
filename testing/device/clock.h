// Clock is a vector clock over streams: it knows that the first `of(stream)`
// tasks of each stream are done.
#ifndef TESTING_DEVICE_CLOCK_H_
#define TESTING_DEVICE_CLOCK_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace testdevice {

class Clock {
 public:
  int64_t of(int stream) const {
    const auto at = static_cast<size_t>(stream);
    return at < done_.size() ? done_[at] : 0;
  }
  void Set(int stream, int64_t done) {
    const auto at = static_cast<size_t>(stream);
    if (at >= done_.size()) done_.resize(at + 1);
    done_[at] = done;
  }
  // Adds what `other` knows.
  void Join(const Clock& other) {
    if (done_.size() < other.done_.size()) done_.resize(other.done_.size());
    for (size_t i = 0; i < other.done_.size(); ++i) {
      done_[i] = std::max(done_[i], other.done_[i]);
    }
  }

 private:
  std::vector<int64_t> done_;  // by stream
};

}  // namespace testdevice
#endif  // TESTING_DEVICE_CLOCK_H_
