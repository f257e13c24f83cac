// Defines what a RankPool and its ranks (tests/support/rank_pool.h) send each
// other.
//
// A frame is its length (8 bytes, little-endian) and that many bytes. A request
// holds the frames name and args. An answer holds one byte that says whether
// the communicator has failed, one with the status code, and the message or
// string.
#ifndef TESTS_SUPPORT_RANK_FRAMES_H_
#define TESTS_SUPPORT_RANK_FRAMES_H_

#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace tessera {

// In a rank's environment: "<timeout> <grace> <backend> <group>".
inline constexpr char kWorkerMark[] = "TESSERA_TEST_RANK";
inline constexpr int kWorkerSocket = 3;
inline constexpr absl::Duration kStartTimeout = absl::Seconds(180);

inline std::string Frame(absl::string_view bytes) {
  const uint64_t length = bytes.size();
  std::string frame(reinterpret_cast<const char*>(&length), sizeof(length));
  frame.append(bytes.data(), bytes.size());
  return frame;
}

// Removes the first frame from `*in` and returns it; nullopt if it is
// incomplete.
inline std::optional<std::string> TakeFrame(std::string* in) {
  uint64_t length = 0;
  if (in->size() < sizeof(length)) return std::nullopt;
  memcpy(&length, in->data(), sizeof(length));
  if (in->size() - sizeof(length) < length) return std::nullopt;
  std::string bytes = in->substr(sizeof(length), length);
  in->erase(0, sizeof(length) + length);
  return bytes;
}

inline bool SendAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    bytes.remove_prefix(sent);
  }
  return true;
}

// Appends what there is; returns false at the end of the stream.
inline bool ReadSome(int fd, std::string* to) {
  char buffer[64 << 10];
  ssize_t got = 0;
  do {
    got = read(fd, buffer, sizeof(buffer));
  } while (got < 0 && errno == EINTR);
  if (got > 0) to->append(buffer, got);
  return got > 0;
}

}  // namespace tessera
#endif  // TESTS_SUPPORT_RANK_FRAMES_H_
