// StageLinks: how the ranks of one pipeline send each other tensors.
#ifndef PARALLEL_PIPELINE_STAGE_LINKS_H_
#define PARALLEL_PIPELINE_STAGE_LINKS_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"

namespace tessera {

class StageLinks {
 public:
  virtual ~StageLinks() = default;

  // Sends `message`, contiguous, which is not changed any more, to stage `to`.
  // `key` is not used again before it was received. LOCAL, ASYNC.
  virtual void Post(int to, int64_t key, at::Tensor message) = 0;
  // Sets `message`, contiguous, to what stage `from` has sent as `key`; waits
  // for it. `what` is for messages. LOCAL. Unavailable, DeadlineExceeded: that
  // rank has failed; InvalidArgument: another size.
  virtual absl::Status Take(int from, int64_t key, const at::Tensor& message,
                            const std::string& what) = 0;
};

}  // namespace tessera
#endif  // PARALLEL_PIPELINE_STAGE_LINKS_H_
