#include "data/distributed_order.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/status.h"

namespace tessera {
namespace {

// Takes "name=NUMBER " off the front of `text`.
bool TakeNumber(absl::string_view name, absl::string_view* text,
                int64_t* number) {
  const size_t space = text->find(' ');
  if (space == absl::string_view::npos) return false;
  absl::string_view word = text->substr(0, space);
  text->remove_prefix(space + 1);
  return absl::ConsumePrefix(&word, name) && absl::ConsumePrefix(&word, "=") &&
         absl::SimpleAtoi(word, number);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SampleOrder>> DistributedOrder::Create(
    const DistributedSamplerOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(DistributedSampler sampler,
                           DistributedSampler::Create(options));
  return std::unique_ptr<SampleOrder>(
      new DistributedOrder(options, std::move(sampler)));
}

std::vector<Sample> DistributedOrder::NextBatch(int64_t count) {
  TESSERA_CHECK_GT(count, 0);
  std::vector<Sample> batch(static_cast<size_t>(count));
  for (Sample& sample : batch) {
    // The state before a sample is the beginning of its round of all ranks; the
    // places after the last sample are padding.
    const SamplerState round = sampler_.state();
    sample.epoch = round.epoch;
    sample.padding = round.position + options_.rank >= options_.num_samples;
    sample.index = sampler_.Next();
  }
  return batch;
}

int64_t DistributedOrder::LeftInEpoch() const {
  const int64_t rest = options_.num_samples - sampler_.state().position;
  const int64_t rounds = rest / options_.world_size;
  const bool ragged = rest % options_.world_size != 0;
  return ragged && !options_.drop_last ? rounds + 1 : rounds;
}

absl::Status DistributedOrder::SetEpoch(int64_t epoch) {
  if (epoch < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("sampler: expected an epoch of 0 or more, got ", epoch));
  }
  sampler_.SetEpoch(epoch);
  return absl::OkStatus();
}

std::string DistributedOrder::OfWhat() const {
  return absl::StrCat("samples=", options_.num_samples, " seed=", options_.seed,
                      " shuffle=", options_.shuffle ? 1 : 0);
}

std::string DistributedOrder::State() const {
  const SamplerState state = sampler_.state();
  return absl::StrCat("epoch=", state.epoch, " position=", state.position, " ",
                      OfWhat());
}

absl::Status DistributedOrder::Seek(absl::string_view state) {
  absl::string_view rest = state;
  SamplerState place;
  if (!TakeNumber("epoch", &rest, &place.epoch) ||
      !TakeNumber("position", &rest, &place.position) || place.epoch < 0 ||
      place.position < 0) {
    return absl::DataLossError(absl::StrCat("sampler: expected a place as '",
                                            State(), "', got '", state, "'"));
  }
  if (rest != OfWhat()) {
    return absl::FailedPreconditionError(
        absl::StrCat("sampler: saved with ", rest, ", but here it is ",
                     OfWhat(), "; is it other data?"));
  }
  if (place.position >= options_.num_samples) {
    return absl::DataLossError(
        absl::StrCat("sampler: expected a position below ",
                     options_.num_samples, ", got '", state, "'"));
  }
  return sampler_.Seek(place);
}

}  // namespace tessera
