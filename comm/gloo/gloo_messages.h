// GlooMessages: what transports over Gloo share: the messages of one collective
// at a time, and waits for them that the monitor and the log can attribute to
// ranks.
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
#include "comm/gloo/gloo_links.h"
#include "comm/reduce/slices.h"
#include "comm/transport.h"

namespace tessera {

class GlooMessages {
 public:
  using Message = std::shared_ptr<GlooLinks::Message>;

  GlooMessages(std::shared_ptr<GlooLinks> links, int rank, int world_size);

  // Sets the listener, before the first Run.
  void Listen(WaitListener listener) { listener_ = std::move(listener); }

  // Runs a collective whose messages point into `memory` and what Keep was
  // given. After an error nothing more can be sent: see GlooLinks::Abandon.
  absl::Status Run(std::vector<at::Tensor> memory,
                   const std::function<absl::Status()>& collective);
  // Keeps `memory` until the collective has succeeded.
  void Keep(std::shared_ptr<void> memory);

  // Carry out GlooLinks' calls of the same names.
  Message Send(at::Tensor t, int peer, uint32_t tag) {
    return links_->Send(std::move(t), peer, tag);
  }
  Message Receive(at::Tensor t, int peer, uint32_t tag) {
    return links_->Receive(std::move(t), peer, tag);
  }
  absl::Status WaitAll(const std::vector<Message>& messages);

  // Sends each part to its rank, and receives that rank's.
  absl::Status MoveParts(uint32_t tag, const MovedParts& parts);
  // Copies this rank's slice of an all-gather, unless it is there already.
  void PutOwn(const at::Tensor& shard, const at::Tensor& whole) const;

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

  const std::shared_ptr<GlooLinks> links_;
  const int rank_, world_size_;
  WaitListener listener_;
  std::vector<std::shared_ptr<void>> kept_;
  // By rank: the collective under way has exchanged something with it.
  std::vector<bool> met_;
};

}  // namespace tessera
#endif  // COMM_GLOO_GLOO_MESSAGES_H_
