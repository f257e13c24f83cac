// What ranks tell each other over the connections of LivenessMonitor, in frames
// of 5 bytes: a kind, and a rank (4 bytes, little-endian). No torch.
//
//   'b'  the rank has left (bye)
//   'g'  its process is gone
//   'p'  are you there? Sent back as it is
#ifndef COMM_WATCH_LIVENESS_FRAMES_H_
#define COMM_WATCH_LIVENESS_FRAMES_H_

#include <cstdint>
#include <cstring>
#include <string>

namespace tessera {

struct LivenessFrame {
  static constexpr size_t kBytes = 5;
  char kind = 0;
  int32_t rank = 0;

  std::string Encode() const {
    std::string bytes(1, kind);
    bytes.append(reinterpret_cast<const char*>(&rank), sizeof(rank));
    return bytes;
  }

  // Takes the first one from `*in`, which has at least kBytes. False: it is
  // none of a job of `world_size` ranks.
  bool Take(std::string* in, int world_size) {
    kind = (*in)[0];
    memcpy(&rank, in->data() + 1, sizeof(rank));
    in->erase(0, kBytes);
    return kind == 'p' ||
           ((kind == 'b' || kind == 'g') && rank >= 0 && rank < world_size);
  }
};

}  // namespace tessera
#endif  // COMM_WATCH_LIVENESS_FRAMES_H_
