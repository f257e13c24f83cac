// File descriptors that go from one rank of a host to the others.
//
// The offering rank listens on a socket with a random name that is not in the
// file system; ranks that know the name connect, and receive the descriptors
// with some bytes. Only processes of the same user can do that, and nothing
// stays behind.
#ifndef COMM_SHM_DESCRIPTORS_H_
#define COMM_SHM_DESCRIPTORS_H_

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace tessera::shm {

// Gives its descriptors to whoever asks, on a thread of its own, until it ends.
class DescriptorOffer {
 public:
  // The descriptors stay the caller's, and open as long as this lives. At most
  // four. `takers`: how many may ask at a time. Unavailable, or
  // ResourceExhausted if there is no thread for it.
  static absl::StatusOr<std::unique_ptr<DescriptorOffer>> Start(
      std::vector<int> descriptors, std::string bytes, int takers);
  ~DescriptorOffer();
  DescriptorOffer(const DescriptorOffer&) = delete;
  DescriptorOffer& operator=(const DescriptorOffer&) = delete;

  const std::string& name() const { return name_; }

 private:
  DescriptorOffer(std::vector<int> descriptors, std::string bytes)
      : descriptors_(std::move(descriptors)), bytes_(std::move(bytes)) {}
  void Serve();

  const std::vector<int> descriptors_;
  const std::string bytes_;
  std::string name_;
  int listener_ = -1;
  std::atomic<bool> done_{false};
  std::thread thread_;
};

// Receives `bytes` and `descriptors`, whose sizes say what is expected; the
// caller then owns the descriptors, which are closed on exec. Unavailable.
absl::Status TakeDescriptors(const std::string& name, absl::Duration timeout,
                             std::string* bytes, std::vector<int>* descriptors);

// Receives descriptors with one message of a connected local socket, which
// blocks or has a time limit; nothing is kept of another kind of message.
absl::Status ReceiveDescriptors(int fd, std::string* bytes,
                                std::vector<int>* descriptors);

}  // namespace tessera::shm
#endif  // COMM_SHM_DESCRIPTORS_H_
