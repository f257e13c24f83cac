// Trains a small model, for tests. It uses plain types, as model.h does.
#ifndef DATA_SENTENCEPIECE_TRAIN_MODEL_TEST_UTIL_H_
#define DATA_SENTENCEPIECE_TRAIN_MODEL_TEST_UTIL_H_

#include <string>

namespace tessera {

// Trains on the file `text` and writes PREFIX.model. `type` is "bpe" or
// "unigram". Returns "" or the error.
std::string TrainSentencePiece(const std::string& text,
                               const std::string& prefix,
                               const std::string& type, int vocab_size);

}  // namespace tessera
#endif  // DATA_SENTENCEPIECE_TRAIN_MODEL_TEST_UTIL_H_
