// Wraps what is used of SentencePiece without its header, which defines an
// absl::string_view of its own, so that no file can include both.
#ifndef DATA_SENTENCEPIECE_MODEL_H_
#define DATA_SENTENCEPIECE_MODEL_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sentencepiece {
class SentencePieceProcessor;
}  // namespace sentencepiece

namespace tessera {

class SentencePieceModel {
 public:
  SentencePieceModel();
  ~SentencePieceModel();

  // These return "" or the error in SentencePiece's words.
  std::string Load(const std::string& path);
  std::string Encode(std::string_view text, std::vector<int>* ids) const;
  std::string Decode(const std::vector<int>& ids, std::string* text) const;

  int vocab_size() const;
  int bos_id() const;  // -1 if there is none
  int eos_id() const;
  int unk_id() const;

 private:
  std::unique_ptr<sentencepiece::SentencePieceProcessor> processor_;
};

}  // namespace tessera
#endif  // DATA_SENTENCEPIECE_MODEL_H_
