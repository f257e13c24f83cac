#include "tools/tokenize_command.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/page/page_numbers.h"
#include "base/status.h"
#include "checkpoint/exchange/terminal.h"
#include "data/file_names.h"
#include "data/mapped_file.h"
#include "data/sentencepiece/sentencepiece_tokenizer.h"
#include "data/text/token_corpus.h"
#include "data/text/token_writer.h"
#include "data/text/tokenizer.h"

namespace tessera {
namespace {

enum class EndToken { kBehind, kBefore, kNowhere };

struct Flags {
  std::string out, decode, tokenizer = "bytes+end", type;
  bool lines = false, header = true;
  EndToken end = EndToken::kBehind;
  int64_t tokens = 100;
  std::vector<std::string> texts;
};

// Returns false after telling what is wrong.
bool ReadFlags(CommandCall* call, Flags* flags) {
  flags->out = call->Get("--out");
  flags->decode = call->Get("--decode");
  flags->tokenizer = call->Get("--tokenizer", flags->tokenizer);
  flags->type = call->Get("--type");
  flags->lines = call->Has("--lines");
  flags->header = !call->Has("--headerless");
  if (call->Has("--begin")) flags->end = EndToken::kBefore;
  if (call->Has("--no_end")) flags->end = EndToken::kNowhere;
  flags->texts = call->words();
  if (!call->ReadNumber("--tokens", 1, &flags->tokens)) return false;
  std::string why;
  if (flags->out.empty() == flags->decode.empty()) {
    why = "expected either --out or --decode";
  } else if (flags->texts.empty() == flags->decode.empty()) {
    why = flags->decode.empty() ? "expected text files"
                                : "--decode takes no text files";
  } else if (call->Has("--begin") && call->Has("--no_end")) {
    why = "expected --begin or --no_end, got both";
  }
  if (why.empty()) return true;
  call->Misused(why);
  return false;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> OpenTokenizer(
    const std::string& name) {
  if (name == "bytes") return std::make_unique<ByteTokenizer>();
  if (name == "bytes+end") return std::make_unique<ByteTokenizer>(true);
  return SentencePieceTokenizer::Open(name);
}

// Returns the requested type, or else the narrowest one that holds the
// vocabulary and that the header supports.
absl::StatusOr<TokenType> TypeOf(const Flags& flags, int64_t vocab_size) {
  for (const TokenType type :
       {TokenType::kUint8, TokenType::kUint16, TokenType::kUint32}) {
    if (flags.type == TokenTypeName(type)) return type;
    const bool possible = type != TokenType::kUint8 || !flags.header;
    if (flags.type.empty() && possible && vocab_size - 1 <= MaxToken(type)) {
      return type;
    }
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--type: expected uint8, uint16 or uint32, got ", flags.type));
}

class Writing {
 public:
  // `bytes`: those of all files; `progress`: CommandCall::progress().
  Writing(const Flags& flags, const Tokenizer& tokenizer, int64_t bytes,
          std::ostream* progress, TokenFileWriter* writer)
      : flags_(flags),
        tokenizer_(tokenizer),
        bytes_(bytes),
        progress_(progress),
        writer_(*writer) {}

  absl::Status AddFile(const std::string& path) {
    TESSERA_ASSIGN_OR_RETURN(const MappedFile file,
                             MappedFile::Open(path, /*min_bytes=*/0));
    if (file.bytes().empty()) return absl::OkStatus();  // like an empty line
    absl::string_view rest(reinterpret_cast<const char*>(file.bytes().data()),
                           file.bytes().size());
    if (!flags_.lines) return Annotate(AddDocument(rest), path);
    for (int64_t line = 1; !rest.empty(); ++line) {
      const size_t length = std::min(rest.find('\n'), rest.size());
      if (length > 0) {
        TESSERA_RETURN_IF_ERROR(Annotate(AddDocument(rest.substr(0, length)),
                                         absl::StrCat(path, ":", line)));
      }
      rest.remove_prefix(std::min(length + 1, rest.size()));
    }
    return absl::OkStatus();
  }

  int64_t num_documents() const { return num_documents_; }

 private:
  absl::Status AddDocument(absl::string_view text) {
    ids_.clear();
    const int32_t end = tokenizer_.eos_id();
    if (flags_.end == EndToken::kBefore) ids_.push_back(end);
    TESSERA_RETURN_IF_ERROR(tokenizer_.Encode(text, &ids_));
    if (flags_.end == EndToken::kBehind) ids_.push_back(end);
    ++num_documents_;
    done_ += static_cast<int64_t>(text.size());
    progress_.Show(done_, bytes_);
    return writer_.Append(ids_);
  }

  const Flags& flags_;
  const Tokenizer& tokenizer_;
  const int64_t bytes_;
  int64_t done_ = 0;
  ProgressLine progress_;
  TokenFileWriter& writer_;
  std::vector<int32_t> ids_;
  int64_t num_documents_ = 0;
};

// Returns the files, and adds up their bytes.
absl::StatusOr<std::vector<std::string>> FilesOf(
    const std::vector<std::string>& patterns, const std::string& out,
    int64_t* bytes) {
  std::vector<std::string> files;
  for (const std::string& pattern : patterns) {
    TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                             MatchFiles(pattern));
    for (const std::string& path : paths) {
      std::error_code error;
      const auto size = std::filesystem::file_size(path, error);
      if (!error) *bytes += static_cast<int64_t>(size);
      if (std::filesystem::equivalent(path, out, error)) {
        return absl::InvalidArgumentError(absl::StrCat(
            path, ": is --out, too; give the tokens another name"));
      }
      files.push_back(path);
    }
  }
  return files;
}

absl::Status Write(const Flags& flags, const Tokenizer& tokenizer,
                   CommandCall* call) {
  if (flags.end != EndToken::kNowhere && tokenizer.eos_id() < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        flags.tokenizer, ": has no end-of-text token; say --no_end"));
  }
  TESSERA_ASSIGN_OR_RETURN(const TokenType type,
                           TypeOf(flags, tokenizer.vocab_size()));
  int64_t bytes = 0;
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> files,
                           FilesOf(flags.texts, flags.out, &bytes));
  TESSERA_ASSIGN_OR_RETURN(
      const std::unique_ptr<TokenFileWriter> writer,
      TokenFileWriter::Create(flags.out, {type, flags.header}));
  int64_t documents = 0;
  {
    Writing writing(flags, tokenizer, bytes, call->progress(), writer.get());
    for (const std::string& file : files) {
      TESSERA_RETURN_IF_ERROR(writing.AddFile(file));
    }
    documents = writing.num_documents();
  }
  TESSERA_RETURN_IF_ERROR(writer->Finish());
  if (call->Has("--quiet")) return absl::OkStatus();
  call->out() << flags.out << ": " << CountText(writer->num_tokens())
              << " tokens of " << CountText(documents)
              << (documents == 1 ? " document, " : " documents, ")
              << TokenTypeName(type)
              << (flags.header ? "" : " without a header") << ", vocabulary "
              << tokenizer.vocab_size();
  if (flags.end != EndToken::kNowhere) {
    call->out() << ", end of text " << tokenizer.eos_id();
  }
  call->out() << "\n";
  return absl::OkStatus();
}

absl::Status Decode(const Flags& flags, const Tokenizer& tokenizer,
                    std::ostream* out) {
  TokenFileOptions options;
  if (!flags.type.empty()) {
    TESSERA_ASSIGN_OR_RETURN(options.headerless,
                             TypeOf(flags, tokenizer.vocab_size()));
  }
  options.vocab_size = tokenizer.vocab_size();
  TESSERA_ASSIGN_OR_RETURN(const TokenCorpus corpus,
                           TokenCorpus::Open(flags.decode, options));
  std::vector<int64_t> tokens(
      static_cast<size_t>(std::min(flags.tokens, corpus.num_tokens())));
  TESSERA_RETURN_IF_ERROR(corpus.CopyTokens(0, absl::MakeSpan(tokens)));
  TESSERA_ASSIGN_OR_RETURN(
      const std::string text,
      tokenizer.Decode(std::vector<int32_t>(tokens.begin(), tokens.end())));
  *out << text << "\n";
  return absl::OkStatus();
}

absl::Status Run(const Flags& flags, CommandCall* call) {
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer,
                           OpenTokenizer(flags.tokenizer));
  return flags.decode.empty() ? Write(flags, *tokenizer, call)
                              : Decode(flags, *tokenizer, &call->out());
}

}  // namespace

int RunTokenize(CommandCall* call) {
  Flags flags;
  if (!ReadFlags(call, &flags)) return 2;
  const absl::Status status = Run(flags, call);
  return status.ok() ? 0 : call->Failed(status);
}

}  // namespace tessera
