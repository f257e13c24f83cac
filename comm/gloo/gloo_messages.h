// GlooMessages: what the communicators that send over Gloo share. The messages
// of one collective at a time, and waiting for them so that the monitor and the
// log know for whom.
//
// Threads: one at a time.
#ifndef COMM_GLOO_GLOO_MESSAGES_H_
#define COMM_GLOO_GLOO_MESSAGES_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "comm/gloo/gloo_transport.h"
#include "comm/reduce/slices.h"

namespace tessera {

class GlooMessages {
 public:
  using Message = std::shared_ptr<GlooTransport::Message>;

  struct Options {
    int rank = 0;
    int world_size = 1;
    std::function<void(int peer)> awaited;  // is waited for now
    // The collective was blocked for so long until something was exchanged with
    // this rank for the first time.
    std::function<void(int peer, absl::Duration)> waited;
  };

  GlooMessages(std::shared_ptr<GlooTransport> transport, Options options);

  // Runs a collective whose messages point into `memory` and what Keep was
  // given. After an error nothing more can be sent: see GlooTransport::Abandon.
  absl::Status Run(std::vector<at::Tensor> memory,
                   const std::function<absl::Status()>& collective);
  // Keeps `memory` until the collective has ended well.
  void Keep(std::shared_ptr<void> memory);

  // As of GlooTransport.
  Message Send(at::Tensor t, int peer, uint32_t tag) {
    return transport_->Send(std::move(t), peer, tag);
  }
  Message Receive(at::Tensor t, int peer, uint32_t tag) {
    return transport_->Receive(std::move(t), peer, tag);
  }
  absl::Status WaitAll(const std::vector<Message>& messages);

  // ---- among `ranks`, of which this is one; the k-th has slice, or text, k

  absl::Status GatherSlices(uint32_t tag, const std::vector<int>& ranks,
                            const at::Tensor& whole,
                            const std::vector<Slice>& slices);
  absl::StatusOr<std::vector<std::string>> GatherTexts(
      uint32_t tag, const std::vector<int>& ranks, const std::string& mine);

 private:
  // The places in `ranks` of the others, those after this one first, so that
  // not all send to the same one at the same time. `own`: this rank's place.
  std::vector<int> OtherPlaces(const std::vector<int>& ranks, int* own) const;

  const std::shared_ptr<GlooTransport> transport_;
  const Options options_;
  std::vector<std::shared_ptr<void>> kept_;
  // By rank: the collective under way has exchanged something with it.
  std::vector<bool> met_;
};

}  // namespace tessera
#endif  // COMM_GLOO_GLOO_MESSAGES_H_
