#include "examples/text/token_batches.h"

#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "base/status.h"

absl::StatusOr<TokenBatches> TokenBatches::Open(
    const TokenBatchesOptions& options) {
  tessera::TokenFileOptions format;
  format.headerless = options.type;
  format.vocab_size = options.vocab_size;
  TESSERA_ASSIGN_OR_RETURN(tessera::TokenCorpus corpus,
                           tessera::TokenCorpus::Open(options.path, format));
  if (corpus.num_samples(options.seq) < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.path, ": expected ", options.seq + 1,
                     " tokens or more, got ", corpus.num_tokens()));
  }
  tessera::DistributedSamplerOptions order;
  order.num_samples = corpus.num_samples(options.seq);
  order.rank = options.rank;
  order.world_size = options.world_size;
  order.seed = options.seed;
  TESSERA_ASSIGN_OR_RETURN(tessera::DistributedSampler sampler,
                           tessera::DistributedSampler::Create(order));
  return TokenBatches(std::move(corpus), std::move(sampler), options);
}

absl::StatusOr<TokenBatches::Batch> TokenBatches::Next(int64_t count,
                                                       at::Device device) {
  const int64_t seq = options_.seq;
  at::Tensor samples = at::empty({count, seq + 1}, at::kLong);
  auto* out = samples.data_ptr<int64_t>();
  for (const int64_t index : sampler_.NextBatch(count)) {
    TESSERA_RETURN_IF_ERROR(corpus_.CopySample(
        index, seq, absl::MakeSpan(out, static_cast<size_t>(seq + 1))));
    out += seq + 1;
  }
  samples = samples.to(device);
  return Batch{samples.slice(1, 0, seq).contiguous(),
               samples.slice(1, 1, seq + 1).contiguous()};
}

std::string TokenBatches::Place() const {
  const tessera::SamplerState state = sampler_.state();
  return absl::StrCat(state.epoch, " ", state.position, " ",
                      corpus_.num_samples(options_.seq), " ", options_.seed);
}

absl::Status TokenBatches::Seek(absl::string_view place) {
  const std::vector<std::string> words =
      absl::StrSplit(std::string(place), ' ');
  tessera::SamplerState state;
  if (words.size() != 4 || !absl::SimpleAtoi(words[0], &state.epoch) ||
      !absl::SimpleAtoi(words[1], &state.position)) {
    return absl::DataLossError(absl::StrCat(
        "expected a place in the data as this program saves it, got '", place,
        "'"));
  }
  const std::string samples = absl::StrCat(corpus_.num_samples(options_.seq));
  const std::string seed = absl::StrCat(options_.seed);
  if (words[2] != samples || words[3] != seed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "saved with ", words[2], " samples in the order of seed ", words[3],
        ", but ", options_.path, " has ", samples, " and the seed is ", seed,
        "; give the data, --seq and --seed that it was saved with"));
  }
  return sampler_.Seek(state);
}
