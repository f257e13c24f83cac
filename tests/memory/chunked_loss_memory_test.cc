// What LinearCrossEntropy holds at its peak: one chunk of logits and the
// gradients, whatever the number of tokens; beside the plain loss.
#include <torch/torch.h>

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/step_memory/step_memory.h"
#include "base/torch/tensor_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nn/linear_cross_entropy.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

using at::Tensor;
using ::testing::Each;

constexpr int64_t kTokens = 1024, kDim = 32, kWords = 4096, kChunk = 64;
constexpr int64_t kSmall = 64 << 10;  // of a chunk, one number a token

// Returns the most bytes that body() holds of tensors at any moment.
template <typename Body>
int64_t PeakOf(const Body& body) {
  StepMemory& memory = StepMemory::Global();
  const StepMemory::Training training;
  (void)memory.EndStep();
  const int64_t before = memory.tensor_bytes();
  body();
  return memory.EndStep().peak_bytes - before;
}

absl::Status Expect(bool holds, const std::string& what) {
  return holds ? absl::OkStatus() : absl::InternalError(what);
}

TESSERA_RANK_FUNCTION(LossMemory) {
  CountTensorMemory();
  at::set_num_threads(1);
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Tensor hidden = torch::randn({kTokens, kDim}, dtype).requires_grad_();
    const Tensor weight = torch::randn({kWords, kDim}, dtype).requires_grad_();
    const Tensor targets = torch::randint(kWords, {kTokens}, torch::kLong);
    LinearCrossEntropyOptions options;
    options.chunk = kChunk;
    const int64_t chunked = PeakOf([&] {
      LinearCrossEntropy(hidden, weight, targets, options).backward();
    });
    hidden.mutable_grad().reset();
    weight.mutable_grad().reset();
    const int64_t plain = PeakOf([&] {
      torch::cross_entropy_loss(at::linear(hidden, weight).to(at::kFloat),
                                targets)
          .backward();
    });
    const int64_t narrow = dtype == at::kFloat ? 0 : 2;  // a number's bytes
    const int64_t wide_weight = 4 * kWords * kDim;
    // In forward: a chunk, its rounded gradient, a chunk's product, in both
    // dtypes as it is added. In backward: gradients, scaled, and in their
    // dtype.
    const int64_t gradients =
        wide_weight + (narrow > 0 ? 2 : 4) * kTokens * kDim;
    const int64_t forward = kChunk * kWords * (4 + narrow) +
                            (narrow > 0 ? (4 + narrow) * kWords * kDim : 0);
    const int64_t backward =
        wide_weight + narrow * kWords * kDim + (4 + narrow) * kTokens * kDim;
    const int64_t bound = gradients + std::max(forward, backward) + kSmall;
    TESSERA_RETURN_IF_ERROR(Expect(
        chunked <= bound, absl::StrCat(at::toString(dtype), ": ", chunked,
                                       " bytes in chunks, at most ", bound)));
    const int64_t logits = 4 * kTokens * kWords;
    TESSERA_RETURN_IF_ERROR(
        Expect(plain >= 2 * logits && chunked * 8 < plain,
               absl::StrCat(at::toString(dtype), ": ", plain,
                            " bytes at once, ", chunked, " in chunks")));
  }
  return "";
}

TEST(ChunkedLossMemoryTest, HoldsOneChunkOfLogits) {
  EXPECT_THAT(RunOnRanks(1, "LossMemory", ""), Each(""));
}

}  // namespace
}  // namespace tessera
