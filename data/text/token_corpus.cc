#include "data/text/token_corpus.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "data/file_names.h"

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
    TESSERA_ASSIGN_OR_RETURN(TokenFile file, TokenFile::Open(path, options));
    files.push_back(std::move(file));
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

absl::Status TokenCorpus::CopySample(int64_t index, int64_t seq_len,
                                     absl::Span<int64_t> out) const {
  TESSERA_CHECK_GE(index, 0);
  TESSERA_CHECK_LT(index, num_samples(seq_len));
  TESSERA_CHECK_EQ(out.size(), seq_len + 1);
  return CopyTokens(index * seq_len, out);
}

size_t TokenCorpus::FileOf(int64_t token) const {
  return static_cast<size_t>(
      std::upper_bound(ends_.begin(), ends_.end(), token) - ends_.begin());
}

absl::Status TokenCorpus::CopyTokens(int64_t begin,
                                     absl::Span<int64_t> out) const {
  TESSERA_CHECK_GE(begin, 0);
  TESSERA_CHECK_LE(static_cast<int64_t>(out.size()), num_tokens() - begin);
  for (size_t i = FileOf(begin); !out.empty(); ++i) {
    const int64_t first = ends_[i] - files_[i].num_tokens();
    const auto count = static_cast<size_t>(
        std::min(static_cast<int64_t>(out.size()), ends_[i] - begin));
    TESSERA_RETURN_IF_ERROR(
        files_[i].CopyTokens(begin - first, out.subspan(0, count)));
    begin += static_cast<int64_t>(count);
    out.remove_prefix(count);
  }
  return absl::OkStatus();
}

std::string TokenCorpus::Describe(int64_t token) const {
  const size_t i = std::min(FileOf(token), files_.size() - 1);
  return absl::StrCat(files_[i].path(), ": token ",
                      token - (ends_[i] - files_[i].num_tokens()));
}

}  // namespace tessera
