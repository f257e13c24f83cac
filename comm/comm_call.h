// CommCall: one collective, from the caller to the transport that runs it.
//
//                  in                    out
//   all-gather     shard [S]             whole [W*S]
//   reduce-scatter whole [W*S]           shard [S], divided by `divisor`
//   all-reduce     undefined             read and written
//   broadcast      undefined             read on `root`, written elsewhere
//   all-to-all     [W*S], part r to r    [W*S], part r from r
//   send-receive   [S], to rank `to`     [S], from rank `from`
//   agreement      `text`                `texts`
//
// Tensors are contiguous, of one dtype and device.
#ifndef COMM_COMM_CALL_H_
#define COMM_COMM_CALL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "c10/core/Device.h"
#include "comm/collective.h"

namespace tessera {

struct CommCall {
  CollectiveOp op = CollectiveOp::kText;
  at::Tensor in, out;
  int root = -1;
  int to = -1, from = -1;  // -1: it sends, or receives, nothing
  double divisor = 1;
  std::string text;
  std::vector<std::string>* texts = nullptr;  // by rank; outlives the call

  // ---- set when its turn comes; identical on ranks whose calls match

  std::string what;        // the tag's, or the op's name; and which group's
  int64_t sequence = 0;    // counts the communicator's collectives from 1
  uint32_t signature = 0;  // of all the ranks must agree on; 31 bits
  std::string details;     // "all-reduce sum, 4000 bytes of float32"

  // "gradient of unit a (all-reduce sum, 4000 bytes of float32)".
  std::string Name() const;
  // Returns the larger of its tensors; undefined for a text.
  const at::Tensor& whole() const;
  c10::Device device() const;
  // False where nothing is received, and `out` stays as it was.
  bool writes_out() const {
    return op != CollectiveOp::kSendReceive || from >= 0;
  }
};

// Returns InvalidArgument unless rank `rank` of `world_size` may start `call`.
// LOCAL.
absl::Status CheckCall(const CommCall& call, int rank, int world_size);

// Makes an exchange of `text`, as a part of `call`. It holds none of its
// tensors.
CommCall TextsWithin(const CommCall& call, std::string text,
                     std::vector<std::string>* texts);

// Parts of a call that only moves them from rank to rank (all-to-all,
// send-receive): by rank, what it is sent and what comes from it; undefined:
// nothing. All parts have one length.
struct MovedParts {
  std::vector<at::Tensor> sent, received;
  int64_t bytes = 0;  // of a part
};
MovedParts PartsOf(const CommCall& call, int world_size);

}  // namespace tessera
#endif  // COMM_COMM_CALL_H_
