#include "data/text/token_corpus.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "data/file_names.h"
#include "data/text/token_widen.h"

namespace tessera {

absl::StatusOr<TokenCorpus> TokenCorpus::Open(absl::string_view pattern,
                                              const TokenFileOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                           MatchFiles(pattern));
  return OpenFiles(paths, options);
}

absl::StatusOr<TokenCorpus> TokenCorpus::OpenFiles(
    absl::Span<const std::string> paths, const TokenFileOptions& options) {
  if (paths.empty()) {
    return absl::InvalidArgumentError(
        "token corpus: expected at least one file, got none");
  }
  std::vector<TokenFile> files;
  files.reserve(paths.size());
  for (const std::string& path : paths) {
    absl::StatusOr<TokenFile> file = TokenFile::Open(path, options);
    TESSERA_RETURN_IF_ERROR(Annotate(file.status(), "token corpus"));
    files.push_back(*std::move(file));
  }
  return TokenCorpus(std::move(files));
}

TokenCorpus::TokenCorpus(std::vector<TokenFile> files)
    : files_(std::move(files)) {
  int64_t end = 0;
  ends_.reserve(files_.size());
  for (const TokenFile& file : files_) {
    end += file.num_tokens();
    ends_.push_back(end);
  }
}

int64_t TokenCorpus::num_samples(int64_t seq_len) const {
  TESSERA_CHECK_GT(seq_len, 0);
  return (num_tokens() - 1) / seq_len;
}

size_t TokenCorpus::FileOf(int64_t token) const {
  return static_cast<size_t>(
      std::upper_bound(ends_.begin(), ends_.end(), token) - ends_.begin());
}

const uint8_t* TokenCorpus::AddressOf(int64_t token) const {
  const size_t i = FileOf(token);
  const TokenFile& file = files_[i];
  const int64_t first = ends_[i] - file.num_tokens();
  return file.bytes().data() + (token - first) * TokenBytes(file.type());
}

template <typename T>
absl::Status TokenCorpus::CopySample(int64_t index, int64_t seq_len,
                                     absl::Span<T> out) const {
  return CopySamples(absl::MakeConstSpan(&index, 1), seq_len, out);
}

template <typename T>
absl::Status TokenCorpus::CopySamples(absl::Span<const int64_t> indices,
                                      int64_t seq_len,
                                      absl::Span<T> out) const {
  TESSERA_CHECK_GT(seq_len, 0);
  TESSERA_CHECK_EQ(out.size(), indices.size() * (seq_len + 1));
  const int64_t end = num_samples(seq_len);
  for (const int64_t index : indices) {
    TESSERA_CHECK_GE(index, 0);
    TESSERA_CHECK_LT(index, end);
  }
  const int64_t sample_bytes = seq_len * TokenBytes(files_[0].type());
  const auto length = static_cast<size_t>(seq_len) + 1;
  // This many samples ahead are as many bytes as a copy looks ahead, or more.
  // After a batch in order the next samples are most likely wanted.
  const int64_t ahead = (kWidenAheadBytes - 1) / sample_bytes + 1;
  const auto count = static_cast<int64_t>(indices.size());
  const bool in_order = count > 0 && indices.back() - indices[0] == count - 1;
  for (int64_t i = 1; i < std::min(ahead, count); ++i) {
    PrefetchTokens(AddressOf(indices[i] * seq_len), sample_bytes);
  }
  for (int64_t i = 0; i < count; ++i) {
    const int64_t next = i + ahead < count ? indices[i + ahead]
                         : in_order        ? indices[i] + ahead
                                           : end;
    TESSERA_RETURN_IF_ERROR(
        CopyTokens(indices[i] * seq_len, out.subspan(i * length, length),
                   next < end ? AddressOf(next * seq_len) : nullptr));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status TokenCorpus::CopyTokens(int64_t begin, absl::Span<T> out,
                                     const void* next) const {
  TESSERA_CHECK_GE(begin, 0);
  TESSERA_CHECK_LE(static_cast<int64_t>(out.size()), num_tokens() - begin);
  for (size_t i = FileOf(begin); !out.empty(); ++i) {
    const int64_t first = ends_[i] - files_[i].num_tokens();
    const auto count = static_cast<size_t>(
        std::min(static_cast<int64_t>(out.size()), ends_[i] - begin));
    TESSERA_RETURN_IF_ERROR(
        files_[i].CopyTokens(begin - first, out.subspan(0, count), next));
    begin += static_cast<int64_t>(count);
    out.remove_prefix(count);
  }
  return absl::OkStatus();
}

#define TESSERA_COPY(T)                                                 \
  template absl::Status TokenCorpus::CopySample(int64_t, int64_t,       \
                                                absl::Span<T>) const;   \
  template absl::Status TokenCorpus::CopySamples(                       \
      absl::Span<const int64_t>, int64_t, absl::Span<T>) const;         \
  template absl::Status TokenCorpus::CopyTokens(int64_t, absl::Span<T>, \
                                                const void*) const
TESSERA_COPY(int32_t);
TESSERA_COPY(int64_t);
#undef TESSERA_COPY

std::string TokenCorpus::Describe(int64_t token) const {
  const size_t i = std::min(FileOf(token), files_.size() - 1);
  return absl::StrCat(files_[i].path(), ": token ",
                      token - (ends_[i] - files_[i].num_tokens()));
}

}  // namespace tessera
