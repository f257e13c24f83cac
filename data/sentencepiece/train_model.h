// Trains a small model, for tests. Plain types: see model.h.
#ifndef DATA_SENTENCEPIECE_TRAIN_MODEL_H_
#define DATA_SENTENCEPIECE_TRAIN_MODEL_H_

#include <string>

namespace tessera {

// Writes PREFIX.model of the file `text`. `type`: "bpe" or "unigram". Returns
// "" or what was wrong.
std::string TrainSentencePiece(const std::string& text,
                               const std::string& prefix,
                               const std::string& type, int vocab_size);

}  // namespace tessera
#endif  // DATA_SENTENCEPIECE_TRAIN_MODEL_H_
