// Rank functions (tests/support/rank_pool.h) that check a collective of the
// world's communicator to the bit, against plain loops, and answer "ok":
//
//   CheckAllGather CheckReduceScatter   "<dtype> <numel> apart|in_place"
//   CheckAllReduce CheckBroadcast       "<dtype> <numel> -"
//   CheckAllToAll CheckSendReceive      "<dtype> <numel> -"
//   GatherTexts                         strings of many lengths
#ifndef TESTS_COMM_COLLECTIVE_CHECKS_H_
#define TESTS_COMM_COLLECTIVE_CHECKS_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"
#include "comm/world/world.h"

namespace tessera {

// The sum of elements [begin, begin + numel) of the ranks' vectors, in the
// order of `ranks`.
at::Tensor SumInOrder(const std::vector<int>& ranks, int64_t begin,
                      int64_t numel, at::ScalarType dtype);

bool SameBits(const at::Tensor& a, const at::Tensor& b);
absl::Status ExpectBits(const at::Tensor& got, const at::Tensor& want,
                        absl::string_view what);

// All collectives of float32 tensors of `device`, and of texts, have the right
// bits. COLLECTIVE.
absl::Status CheckTensorCollectives(const World& world, Communicator& comm,
                                    at::Device device);
// Sums of bfloat16 and float16: in float32, rounded once, divided, rounded
// again. COLLECTIVE.
absl::Status CheckHalves(const World& world, Communicator& comm,
                         at::Device device);

}  // namespace tessera
#endif  // TESTS_COMM_COLLECTIVE_CHECKS_H_
