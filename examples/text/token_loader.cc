#include "examples/text/token_loader.h"

#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "tessera/tessera.h"

namespace {

// The vocabulary of bytes with an end-of-text token, rounded up as models do.
constexpr int64_t kMostOfBytes = 512;

absl::Span<int64_t> Values(const at::Tensor& tensor) {
  return absl::MakeSpan(tensor.data_ptr<int64_t>(),
                        static_cast<size_t>(tensor.numel()));
}

}  // namespace

absl::StatusOr<TokenText> TokenText::Open(const TokenTextOptions& options) {
  if (options.seq < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--seq: expected a whole number above 0, got ", options.seq));
  }
  tessera::TokenFileOptions format;
  format.headerless = options.type;
  format.vocab_size = options.vocab_size;
  TESSERA_ASSIGN_OR_RETURN(tessera::TokenCorpus corpus,
                           tessera::TokenCorpus::Open(options.path, format));
  const tessera::TokenFile& file = corpus.files().front();
  if (file.type() == tessera::TokenType::kUint8 &&
      options.vocab_size > kMostOfBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.path,
                     ": its tokens are bytes, which mean nothing to a model "
                     "with a vocabulary of ",
                     options.vocab_size,
                     "; make a file of tokens with the model's tokenizer "
                     "(docs/fine_tuning.md)"));
  }
  TokenText text(std::move(corpus), options);
  if (text.trained_samples() >= 1) return text;
  return absl::InvalidArgumentError(absl::StrCat(
      options.path, ": expected ", (options.held_out + 1) * options.seq + 1,
      " tokens or more, got ", text.num_tokens(),
      options.held_out == 0 ? "" : "; or hold out fewer samples"));
}

absl::StatusOr<std::unique_ptr<tessera::DataLoader>> TokenText::Load(
    int64_t batch_size, int rank, int world_size, at::Device device) const {
  tessera::DistributedSamplerOptions order_options;
  order_options.num_samples = trained_samples();
  order_options.rank = rank;
  order_options.world_size = world_size;
  order_options.seed = options_.seed;
  TESSERA_ASSIGN_OR_RETURN(auto order,
                           tessera::DistributedOrder::Create(order_options));
  tessera::DataLoaderOptions options;
  options.batch_size = batch_size;
  options.workers = 1;
  options.device = device;
  const auto fetch = [corpus = corpus_, seq = options_.seq](
                         absl::Span<const int64_t> indices,
                         const tessera::BatchContext& context)
      -> absl::StatusOr<std::vector<at::Tensor>> {
    const auto samples = context.Empty(
        {static_cast<int64_t>(indices.size()), seq + 1}, at::kLong);
    TESSERA_RETURN_IF_ERROR(corpus->CopySamples(indices, seq, Values(samples)));
    return std::vector<at::Tensor>{samples};
  };
  return tessera::DataLoader::Create(std::move(order), fetch, options);
}

absl::StatusOr<at::Tensor> TokenText::HeldOut(int64_t index) const {
  const auto sample = at::empty({1, options_.seq + 1}, at::kLong);
  TESSERA_RETURN_IF_ERROR(corpus_->CopySample(trained_samples() + index,
                                              options_.seq, Values(sample)));
  return sample;
}
