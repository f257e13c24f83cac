// DocumentIndex says where the documents of a token corpus begin and end.
//
//   tokens     [ a b c E | d E | e f ]    E: the end-of-text token
//   kAtEnd       doc 0   doc 1  doc 2     a document ends with its E; the last
//                                         may lack it (nanoGPT)
//   tokens     [ E a b c | E d | E e f ]
//   kAtBegin     doc 0    doc 1  doc 2    a document begins with its E; what is
//                                         before the first is one too (llm.c)
//
// It is built once, by reading the whole corpus (at up to 10 GB/s, depending on
// the disk), then saved and mapped: a file of 64 bytes and 8 for each document,
// which the processes of a host share.
//
//   byte 0   "TSRDOCS1"
//        8   int64: tokens, documents, the end-of-text token or -1, 0 or 1 for
//            kAtEnd or kAtBegin; zeros up to byte 64
//       64   int64 of each document: the tokens of the corpus up to its end
//
// (Numbers are little-endian.) Threads: const methods may run concurrently.
#ifndef DATA_TEXT_DOCUMENT_INDEX_H_
#define DATA_TEXT_DOCUMENT_INDEX_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "data/mapped_file.h"
#include "data/text/token_corpus.h"

namespace tessera {

enum class EndTokenPlace { kAtEnd, kAtBegin };

class DocumentIndex {
 public:
  // Reads `corpus`. Returns InvalidArgument for an end token below 0, or one
  // that does not occur in the corpus: then the corpus is another one, or there
  // is only one document, for which FromEnds can be used. Takes O(tokens) time
  // and 8 bytes for each document. LOCAL.
  static absl::StatusOr<DocumentIndex> Build(
      const TokenCorpus& corpus, int64_t end_token,
      EndTokenPlace place = EndTokenPlace::kAtEnd);

  // Makes an index of known ends: document i ends before token ends[i] and
  // begins where the previous one ended, the first at 0. Returns
  // InvalidArgument naming the first end that does not grow, or if the last is
  // not `num_tokens`.
  static absl::StatusOr<DocumentIndex> FromEnds(std::vector<int64_t> ends,
                                                int64_t num_tokens);

  // Writes the file, whole or not at all: under another name first, then
  // renamed. Returns the system's words with the path if that fails. LOCAL: one
  // rank writes.
  absl::Status Save(const std::string& path) const;
  // Maps the file. Returns DataLoss naming path and byte for a file that is no
  // index or is damaged, and FailedPrecondition if it belongs to another
  // corpus: one with another number of tokens, or where an end token is not
  // where a document says (64 of them are checked). LOCAL.
  static absl::StatusOr<DocumentIndex> Load(const std::string& path,
                                            const TokenCorpus& corpus);

  int64_t num_documents() const { return static_cast<int64_t>(ends().size()); }
  int64_t num_tokens() const { return ends().back(); }
  // Returns the end token; nullopt after FromEnds.
  std::optional<int64_t> end_token() const;
  EndTokenPlace place() const { return place_; }

  // Document `i` is tokens [begin(i), end(i)), at least one. REQUIRES: 0 <= i <
  // num_documents().
  int64_t begin(int64_t i) const {
    return i == 0 ? 0 : ends()[static_cast<size_t>(i) - 1];
  }
  int64_t end(int64_t i) const { return ends()[static_cast<size_t>(i)]; }
  // Returns the document that token `token` belongs to. O(log documents).
  // REQUIRES: 0 <= token < num_tokens().
  int64_t DocumentOf(int64_t token) const;

 private:
  DocumentIndex() = default;
  absl::Span<const int64_t> ends() const {
    return file_.has_value() ? mapped_ : absl::Span<const int64_t>(built_);
  }
  absl::Status CheckEnds(int64_t num_tokens) const;
  absl::Status CheckCorpus(const TokenCorpus& corpus,
                           const std::string& path) const;

  int64_t end_token_ = -1;  // -1: made by FromEnds
  EndTokenPlace place_ = EndTokenPlace::kAtEnd;
  std::vector<int64_t> built_;  // or mapped_, where it was loaded
  std::optional<MappedFile> file_;
  absl::Span<const int64_t> mapped_;  // in file_
};

}  // namespace tessera
#endif  // DATA_TEXT_DOCUMENT_INDEX_H_
