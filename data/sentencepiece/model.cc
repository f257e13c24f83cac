#include "data/sentencepiece/model.h"

#include <sentencepiece_processor.h>

namespace tessera {
namespace {

std::string WordsOf(const sentencepiece::util::Status& status) {
  return status.ok() ? "" : status.ToString();
}

}  // namespace

SentencePieceModel::SentencePieceModel()
    : processor_(std::make_unique<sentencepiece::SentencePieceProcessor>()) {}
SentencePieceModel::~SentencePieceModel() = default;

std::string SentencePieceModel::Load(const std::string& path) {
  return WordsOf(processor_->Load(path));
}

std::string SentencePieceModel::Encode(std::string_view text,
                                       std::vector<int>* ids) const {
  return WordsOf(processor_->Encode(text, ids));
}

std::string SentencePieceModel::Decode(const std::vector<int>& ids,
                                       std::string* text) const {
  return WordsOf(processor_->Decode(ids, text));
}

int SentencePieceModel::vocab_size() const {
  return processor_->GetPieceSize();
}
int SentencePieceModel::bos_id() const { return processor_->bos_id(); }
int SentencePieceModel::eos_id() const { return processor_->eos_id(); }
int SentencePieceModel::unk_id() const { return processor_->unk_id(); }

}  // namespace tessera
