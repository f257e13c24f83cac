#include "data/mixture_order.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/check.h"

namespace tessera {

absl::StatusOr<std::unique_ptr<SampleOrder>> MixtureOrder::Create(
    const Mixture* mixture, int rank, int world_size) {
  if (rank < 0 || rank >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("mixture: expected a rank of 0 to world size - 1, got ",
                     rank, " of ", world_size));
  }
  if (mixture->num_samples() < world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "mixture: ", mixture->num_samples(),
        " samples before the first source ends are less than one for each of ",
        world_size, " ranks"));
  }
  return std::unique_ptr<SampleOrder>(
      new MixtureOrder(mixture, rank, world_size));
}

void MixtureOrder::Settle() {
  if (mixture_.num_samples() - position_ >= world_size_) return;
  ++epoch_;
  position_ = 0;
}

std::vector<Sample> MixtureOrder::NextBatch(int64_t count) {
  TESSERA_CHECK_GT(count, 0);
  std::vector<Sample> batch(static_cast<size_t>(count));
  for (Sample& sample : batch) {
    sample.epoch = epoch_;
    sample.index = position_ + rank_;
    position_ += world_size_;
    Settle();
  }
  return batch;
}

int64_t MixtureOrder::LeftInEpoch() const {
  if (mixture_.num_samples() == Mixture::kEndless) return kEndless;
  return (mixture_.num_samples() - position_) / world_size_;
}

absl::Status MixtureOrder::SetEpoch(int64_t epoch) {
  const bool endless = mixture_.num_samples() == Mixture::kEndless;
  if (epoch < 0 || (endless && epoch > 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "mixture: expected an epoch of 0", endless ? "" : " or more",
        endless ? ", since its sources repeat" : "", ", got ", epoch));
  }
  epoch_ = epoch;
  position_ = 0;
  return absl::OkStatus();
}

std::string MixtureOrder::OfWhat() const {
  return absl::StrCat("mixture=", absl::Hex(mixture_.fingerprint()));
}

std::string MixtureOrder::State() const {
  return absl::StrCat("epoch=", epoch_, " position=", position_, " ", OfWhat());
}

absl::Status MixtureOrder::Seek(absl::string_view state) {
  std::vector<absl::string_view> words = absl::StrSplit(state, ' ');
  int64_t epoch, position;
  if (words.size() != 3 || !absl::ConsumePrefix(&words[0], "epoch=") ||
      !absl::ConsumePrefix(&words[1], "position=") ||
      !absl::SimpleAtoi(words[0], &epoch) ||
      !absl::SimpleAtoi(words[1], &position) || epoch < 0 || position < 0) {
    return absl::DataLossError(absl::StrCat("mixture: expected a place as '",
                                            State(), "', got '", state, "'"));
  }
  if (words[2] != OfWhat() || position >= mixture_.num_samples()) {
    return absl::FailedPreconditionError(
        absl::StrCat("mixture: cannot go to '", state, "', this is ", OfWhat(),
                     ": other sources, weights, sizes or another seed"));
  }
  epoch_ = epoch;
  position_ = position;
  Settle();
  return absl::OkStatus();
}

}  // namespace tessera
