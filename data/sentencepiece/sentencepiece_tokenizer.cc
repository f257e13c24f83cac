#include "data/sentencepiece/sentencepiece_tokenizer.h"

#include <string_view>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "data/mapped_file.h"
#include "data/sentencepiece/model.h"

namespace tessera {

static_assert(sizeof(int) == sizeof(int32_t));

SentencePieceTokenizer::SentencePieceTokenizer()
    : model_(std::make_unique<SentencePieceModel>()) {}
SentencePieceTokenizer::~SentencePieceTokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> SentencePieceTokenizer::Open(
    const std::string& path) {
  // SentencePiece gives no reason for a file that it cannot open, so this does.
  TESSERA_RETURN_IF_ERROR(MappedFile::Open(path).status());
  auto tokenizer = absl::WrapUnique(new SentencePieceTokenizer);
  const std::string words = tokenizer->model_->Load(path);
  if (!words.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": is no SentencePiece model: ", words));
  }
  return tokenizer;
}

int32_t SentencePieceTokenizer::vocab_size() const {
  return model_->vocab_size();
}
int32_t SentencePieceTokenizer::bos_id() const { return model_->bos_id(); }
int32_t SentencePieceTokenizer::eos_id() const { return model_->eos_id(); }
int32_t SentencePieceTokenizer::unk_id() const { return model_->unk_id(); }

absl::Status SentencePieceTokenizer::Encode(absl::string_view text,
                                            std::vector<int32_t>* ids) const {
  std::vector<int> of_text;
  const std::string words =
      model_->Encode(std::string_view(text.data(), text.size()), &of_text);
  if (!words.empty()) return absl::InvalidArgumentError(words);
  ids->insert(ids->end(), of_text.begin(), of_text.end());
  return absl::OkStatus();
}

absl::StatusOr<std::string> SentencePieceTokenizer::Decode(
    absl::Span<const int32_t> ids) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= 0 && ids[i] < vocab_size()) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "token ", i, " is ", ids[i], ", the vocabulary has ", vocab_size()));
  }
  std::string text;
  const std::string words =
      model_->Decode(std::vector<int>(ids.begin(), ids.end()), &text);
  if (!words.empty()) return absl::InvalidArgumentError(words);
  return text;
}

}  // namespace tessera
