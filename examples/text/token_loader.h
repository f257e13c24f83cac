// Loads files of tokens as batches: each rank loads its own samples, in an
// order that the seed determines, ahead of time on a thread.
#ifndef EXAMPLES_TEXT_TOKEN_LOADER_H_
#define EXAMPLES_TEXT_TOKEN_LOADER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "data/text/token_corpus.h"
#include "data/text/token_file.h"
#include "tessera/tessera.h"

struct TokenTextOptions {
  // A file, or a pattern (tessera::TokenCorpus::Open). llm.c's files say the
  // type of their tokens; other files have tokens of `type`: any text with a
  // token for each byte, nanoGPT's files with kUint16.
  std::string path;
  tessera::TokenType type = tessera::TokenType::kUint8;
  int64_t vocab_size = 256;  // tokens have to be less
  int64_t seq = 64;          // tokens that a model is given at once
  int64_t held_out = 0;      // this many samples at the end are not trained on
  uint64_t seed = 1;
};

class TokenText {
 public:
  // Opens the text. LOCAL: a file may be missing on one rank alone. Errors are
  // those of TokenCorpus::Open, and InvalidArgument if there is no whole sample
  // to train on, or if tokens are bytes and the vocabulary is not.
  static absl::StatusOr<TokenText> Open(const TokenTextOptions& options);

  // Returns a loader whose batches are this rank's samples: tensors[0] is
  // [batch_size, seq + 1] of int64, on its device. The loader's State is the
  // place in the data, for a checkpoint; its Load resumes there with any number
  // of ranks. Its Next returns InvalidArgument for a token outside the
  // vocabulary. Errors are those of DataLoader::Create.
  absl::StatusOr<std::unique_ptr<tessera::DataLoader>> Load(
      int64_t batch_size, int rank, int world_size, at::Device device) const;
  absl::StatusOr<std::unique_ptr<tessera::DataLoader>> Load(
      int64_t batch_size, const tessera::World& world) const {
    return Load(batch_size, world.rank(), world.world_size(), world.device());
  }

  // Returns one held-out sample, 0 <= index < held_out, on the CPU.
  absl::StatusOr<at::Tensor> HeldOut(int64_t index) const;

  int64_t num_tokens() const { return corpus_->num_tokens(); }

 private:
  TokenText(tessera::TokenCorpus corpus, TokenTextOptions options)
      : corpus_(
            std::make_shared<const tessera::TokenCorpus>(std::move(corpus))),
        options_(std::move(options)) {}
  int64_t trained_samples() const {
    return corpus_->num_samples(options_.seq) - options_.held_out;
  }

  std::shared_ptr<const tessera::TokenCorpus> corpus_;  // loaders read it, too
  TokenTextOptions options_;
};

// Splits samples [n, seq + 1] into what a model is given and what it should
// predict, one token further on; both are [n, seq] and contiguous.
struct TokenBatch {
  explicit TokenBatch(const at::Tensor& samples)
      : tokens(samples.slice(1, 0, -1).contiguous()),
        targets(samples.slice(1, 1).contiguous()) {}
  at::Tensor tokens, targets;
};

#endif  // EXAMPLES_TEXT_TOKEN_LOADER_H_
