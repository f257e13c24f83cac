#include "data/byte_corpus.h"

#include "base/check.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<ByteCorpus> ByteCorpus::Open(const std::string& path,
                                            int64_t min_bytes) {
  TESSERA_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path, min_bytes));
  return ByteCorpus(std::move(file));
}

int64_t ByteCorpus::num_samples(int64_t seq_len) const {
  TESSERA_CHECK_GT(seq_len, 0);
  return bytes().empty() ? 0
                         : (static_cast<int64_t>(bytes().size()) - 1) / seq_len;
}

absl::Span<const uint8_t> ByteCorpus::sample(int64_t index,
                                             int64_t seq_len) const {
  TESSERA_CHECK_GE(index, 0);
  TESSERA_CHECK_LT(index, num_samples(seq_len));
  return bytes().subspan(static_cast<size_t>(index * seq_len),
                         static_cast<size_t>(seq_len) + 1);
}

}  // namespace tessera
