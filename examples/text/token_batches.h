// TokenBatches: files of tokens as batches, each rank its own samples, in an
// order that the seed gives.
#ifndef EXAMPLES_TEXT_TOKEN_BATCHES_H_
#define EXAMPLES_TEXT_TOKEN_BATCHES_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "data/distributed_sampler.h"
#include "data/text/token_corpus.h"
#include "data/text/token_file.h"

struct TokenBatchesOptions {
  // A file, or a pattern (tessera::TokenCorpus::Open): llm.c's files, which say
  // of which type their tokens are, and others, whose tokens are of this: any
  // text with a token for each byte, nanoGPT's files with kUint16.
  std::string path;
  tessera::TokenType type = tessera::TokenType::kUint8;
  int64_t vocab_size = 256;  // tokens have to be less
  int64_t seq = 64;          // tokens that a model is given at once
  uint64_t seed = 1;
  int rank = 0;
  int world_size = 1;
};

class TokenBatches {
 public:
  struct Batch {
    at::Tensor tokens,
        targets;  // [count, seq] of int64; targets one further on
  };

  // LOCAL: a file may be missing on one rank alone. Errors:
  // TokenCorpus::Open's; InvalidArgument where there is no whole sample.
  static absl::StatusOr<TokenBatches> Open(const TokenBatchesOptions& options);

  // This rank's next samples, on `device`. InvalidArgument of a token outside
  // of the vocabulary.
  absl::StatusOr<Batch> Next(int64_t count, at::Device device);

  // The place in the data, the same on all ranks that run in step: for a
  // checkpoint. Seek goes on there, with any number of ranks.
  std::string Place() const;
  absl::Status Seek(absl::string_view place);

 private:
  TokenBatches(tessera::TokenCorpus corpus, tessera::DistributedSampler sampler,
               TokenBatchesOptions options)
      : corpus_(std::move(corpus)),
        sampler_(std::move(sampler)),
        options_(std::move(options)) {}

  tessera::TokenCorpus corpus_;
  tessera::DistributedSampler sampler_;
  TokenBatchesOptions options_;
};

#endif  // EXAMPLES_TEXT_TOKEN_BATCHES_H_
