#include "data/text/document_index.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file.h"
#include "base/status.h"

namespace tessera {
namespace {

struct Header {
  char magic[8];
  int64_t num_tokens;
  int64_t num_documents;
  int64_t end_token;
  int64_t place;
  int64_t zeros[3];
};
static_assert(sizeof(Header) == 64);
constexpr char kMagic[9] = "TSRDOCS1";

// Appends `first` + i for every i with tokens[i] == end. It works in blocks,
// most of which have none, and takes no branch within one.
template <typename T>
void FindAll(const T* tokens, int64_t count, T end, int64_t first,
             std::vector<int64_t>* found) {
  constexpr int64_t kBlock = 256;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t stop = std::min(count, begin + kBlock);
    T any = 0;
    for (int64_t i = begin; i < stop; ++i) any |= T{tokens[i] == end};
    if (any == 0) continue;
    for (int64_t i = begin; i < stop; ++i) {
      if (tokens[i] == end) found->push_back(first + i);
    }
  }
}

void FindInFile(const TokenFile& file, int64_t end, int64_t first,
                std::vector<int64_t>* found) {
  if (end > MaxToken(file.type())) return;
  const uint8_t* const bytes = file.bytes().data();
  const int64_t count = file.num_tokens();
  switch (file.type()) {
    case TokenType::kUint8:
      return FindAll(bytes, count, static_cast<uint8_t>(end), first, found);
    case TokenType::kUint16:
      return FindAll(reinterpret_cast<const uint16_t*>(bytes), count,
                     static_cast<uint16_t>(end), first, found);
    case TokenType::kUint32:
      return FindAll(reinterpret_cast<const uint32_t*>(bytes), count,
                     static_cast<uint32_t>(end), first, found);
  }
}

}  // namespace

absl::StatusOr<DocumentIndex> DocumentIndex::Build(const TokenCorpus& corpus,
                                                   int64_t end_token,
                                                   EndTokenPlace place) {
  DocumentIndex index;
  index.end_token_ = end_token;
  index.place_ = place;
  std::vector<int64_t>& ends = index.built_;
  if (end_token >= 0) {
    int64_t first = 0;
    for (const TokenFile& file : corpus.files()) {
      FindInFile(file, end_token, first, &ends);
      first += file.num_tokens();
    }
  }
  if (ends.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        corpus.files()[0].path(),
        corpus.files().size() > 1 ? " and others" : "",
        ": the end-of-text token ", end_token, " is nowhere among ",
        corpus.num_tokens(), " tokens; is it another one?"));
  }
  if (place == EndTokenPlace::kAtEnd) {
    for (int64_t& end : ends) ++end;  // one past its end token
  } else if (ends.front() == 0) {
    ends.erase(ends.begin());  // nothing ends where the first begins
  }
  if (ends.empty() || ends.back() != corpus.num_tokens()) {
    ends.push_back(corpus.num_tokens());
  }
  ends.shrink_to_fit();
  return index;
}

absl::StatusOr<DocumentIndex> DocumentIndex::FromEnds(std::vector<int64_t> ends,
                                                      int64_t num_tokens) {
  DocumentIndex index;
  index.built_ = std::move(ends);
  TESSERA_RETURN_IF_ERROR(index.CheckEnds(num_tokens));
  return index;
}

absl::Status DocumentIndex::CheckEnds(int64_t num_tokens) const {
  if (num_documents() == 0) {
    return absl::InvalidArgumentError("expected at least one document");
  }
  int64_t before = 0;
  for (int64_t i = 0; i < num_documents(); ++i) {
    if (end(i) <= before) {
      return absl::InvalidArgumentError(
          absl::StrCat("document ", i, " ends at token ", end(i),
                       ", expected more than ", before));
    }
    before = end(i);
  }
  if (before == num_tokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the last of ", num_documents(), " documents ends at token ",
                   before, ", expected ", num_tokens));
}

absl::Status DocumentIndex::Save(const std::string& path) const {
  Header header = {};
  std::memcpy(header.magic, kMagic, sizeof(header.magic));
  header.num_tokens = num_tokens();
  header.num_documents = num_documents();
  header.end_token = end_token_;
  header.place = place_ == EndTokenPlace::kAtBegin;
  const std::string part = path + ".part";
  const int fd =
      open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (fd < 0) return FileError(errno, part);
  bool renamed = false;
  const auto closer = absl::MakeCleanup([&] {
    close(fd);
    if (!renamed) unlink(part.c_str());
  });
  TESSERA_RETURN_IF_ERROR(WriteAt(
      fd, part, 0, reinterpret_cast<const char*>(&header), sizeof(header)));
  TESSERA_RETURN_IF_ERROR(WriteAt(fd, part, sizeof(header),
                                  reinterpret_cast<const char*>(ends().data()),
                                  8 * num_documents()));
  if (fsync(fd) != 0) return FileError(errno, part);
  if (rename(part.c_str(), path.c_str()) != 0) return FileError(errno, path);
  renamed = true;
  return SyncFolderOf(path);
}

absl::StatusOr<DocumentIndex> DocumentIndex::Load(const std::string& path,
                                                  const TokenCorpus& corpus) {
  TESSERA_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
  const absl::Span<const uint8_t> bytes = file.bytes();
  Header header = {};
  std::memcpy(&header, bytes.data(), std::min(bytes.size(), sizeof(header)));
  if (std::memcmp(header.magic, kMagic, sizeof(header.magic)) != 0) {
    return absl::DataLossError(absl::StrCat(path, ": byte 0: expected ", kMagic,
                                            ", this is no index of documents"));
  }
  const auto file_documents =
      (static_cast<int64_t>(bytes.size()) - int64_t{sizeof(header)}) / 8;
  if (bytes.size() % 8 != 0 || header.num_documents < 1 ||
      header.num_documents != file_documents) {
    return absl::DataLossError(
        absl::StrCat(path, ": byte 16: the header says ", header.num_documents,
                     " documents, the file of ", bytes.size(),
                     " bytes has another number of them; is it truncated?"));
  }
  const bool rest_is_right =
      header.end_token >= -1 && (header.place == 0 || header.place == 1) &&
      header.zeros[0] == 0 && header.zeros[1] == 0 && header.zeros[2] == 0;
  if (!rest_is_right) {
    return absl::DataLossError(
        absl::StrCat(path,
                     ": byte 24: the end-of-text token, its place or the "
                     "zeros after it are invalid; is it damaged?"));
  }
  DocumentIndex index;
  index.end_token_ = header.end_token;
  index.place_ =
      header.place == 1 ? EndTokenPlace::kAtBegin : EndTokenPlace::kAtEnd;
  index.mapped_ = {
      reinterpret_cast<const int64_t*>(bytes.data() + sizeof(header)),
      static_cast<size_t>(header.num_documents)};
  index.file_ = std::move(file);
  if (const absl::Status status = index.CheckEnds(header.num_tokens);
      !status.ok()) {
    return absl::DataLossError(absl::StrCat(path, ": ", status.message()));
  }
  TESSERA_RETURN_IF_ERROR(index.CheckCorpus(corpus, path));
  return index;
}

absl::Status DocumentIndex::CheckCorpus(const TokenCorpus& corpus,
                                        const std::string& path) const {
  constexpr int64_t kLooks = 64;
  if (num_tokens() != corpus.num_tokens()) {
    return absl::FailedPreconditionError(
        absl::StrCat(path, ": is of ", num_tokens(), " tokens, the corpus has ",
                     corpus.num_tokens(), "; build it again"));
  }
  if (end_token_ < 0) return absl::OkStatus();
  // There is an end token between documents, on one side or the other.
  const int64_t borders = num_documents() - 1;
  const int64_t looks = std::min(kLooks, borders);
  for (int64_t i = 0; i < looks; ++i) {
    const int64_t border = end(i * borders / looks);
    const int64_t at = place_ == EndTokenPlace::kAtEnd ? border - 1 : border;
    int64_t token = 0;
    TESSERA_RETURN_IF_ERROR(corpus.CopyTokens(at, absl::MakeSpan(&token, 1)));
    if (token == end_token_) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        path, ": is of other data: ", corpus.Describe(at), " is ", token,
        ", expected the end-of-text token ", end_token_, "; build it again"));
  }
  return absl::OkStatus();
}

std::optional<int64_t> DocumentIndex::end_token() const {
  if (end_token_ < 0) return std::nullopt;
  return end_token_;
}

int64_t DocumentIndex::DocumentOf(int64_t token) const {
  TESSERA_CHECK_GE(token, 0);
  TESSERA_CHECK_LT(token, num_tokens());
  return std::upper_bound(ends().begin(), ends().end(), token) - ends().begin();
}

}  // namespace tessera
