#include "data/sentencepiece/train_model_test_util.h"

#include <sentencepiece_trainer.h>

namespace tessera {

std::string TrainSentencePiece(const std::string& text,
                               const std::string& prefix,
                               const std::string& type, int vocab_size) {
  const auto status = sentencepiece::SentencePieceTrainer::Train(
      "--input=" + text + " --model_prefix=" + prefix +
      " --model_type=" + type + " --vocab_size=" + std::to_string(vocab_size) +
      " --num_threads=1 --minloglevel=2");
  return status.ok() ? "" : status.ToString();
}

}  // namespace tessera
