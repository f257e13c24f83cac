#include "config/reader/json_reader.h"

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "config/reader/decimal.h"
#include "config/reader/utf8.h"

namespace tessera {
namespace {

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

bool IsHighSurrogate(uint32_t code) { return code >= 0xD800 && code < 0xDC00; }
bool IsLowSurrogate(uint32_t code) { return code >= 0xDC00 && code < 0xE000; }

// Parser is a recursive-descent parser of `text_`; every function leaves the
// cursor behind what it read.
class Parser {
 public:
  Parser(absl::string_view text, absl::string_view file_name,
         const JsonLimits& limits, std::vector<JsonDuplicate>* duplicates)
      : text_(text),
        file_name_(file_name),
        limits_(limits),
        duplicates_(duplicates) {}

  absl::StatusOr<JsonValue> Parse() {
    if (static_cast<int64_t>(text_.size()) > limits_.max_bytes) {
      return FaultHere(
          absl::StrCat("the text has more than ", limits_.max_bytes, " bytes"));
    }
    if (absl::StartsWith(text_, "\xEF\xBB\xBF")) offset_ = 3;  // no column
    TESSERA_RETURN_IF_ERROR(SkipBlank());
    JsonValue root;
    TESSERA_RETURN_IF_ERROR(ReadValue(root));
    TESSERA_RETURN_IF_ERROR(SkipBlank());
    if (!AtEnd()) {
      return FaultHere(
          absl::StrCat("expected the end of the file, got ", Seen()));
    }
    return root;
  }

 private:
  bool AtEnd() const { return offset_ == text_.size(); }
  // Returns the byte at the cursor, or 0 at the end. A NUL in the text is never
  // legal, so only messages need to distinguish the two.
  char Peek() const { return AtEnd() ? '\0' : text_[offset_]; }
  absl::string_view Rest() const { return text_.substr(offset_); }

  // Steps over one ASCII character or one whole UTF-8 one.
  void Advance(int bytes = 1) {
    if (text_[offset_] == '\n') {
      ++position_.line;
      position_.column = 1;
    } else {
      ++position_.column;
    }
    offset_ += static_cast<size_t>(bytes);
  }
  void AdvanceAscii(size_t count) {
    for (size_t i = 0; i < count; ++i) Advance();
  }

  absl::Status Fault(JsonPosition position, absl::string_view message) const {
    return absl::InvalidArgumentError(
        absl::StrCat(FormatPosition(file_name_, position), ": ", message));
  }
  absl::Status FaultHere(absl::string_view message) const {
    return Fault(position_, message);
  }

  // Describes what is at the cursor.
  std::string Seen() const {
    if (AtEnd()) return "the end of the file";
    const unsigned char c = static_cast<unsigned char>(Peek());
    if (c < 0x20 || c == 0x7F) return absl::StrFormat("character 0x%02x", c);
    const int length = Utf8Length(Rest());
    if (length == 0) return absl::StrFormat("byte 0x%02x, not UTF-8", c);
    return absl::StrCat("'", Rest().substr(0, length), "'");
  }

  absl::Status SkipBlank() {
    while (!AtEnd()) {
      const char c = Peek();
      if (c == ' ' || c == '\t' || c == '\n' || c == '\r') {
        Advance();
      } else if (c == '#' || absl::StartsWith(Rest(), "//")) {
        TESSERA_RETURN_IF_ERROR(SkipComment("\n", /*must_end=*/false));
      } else if (absl::StartsWith(Rest(), "/*")) {
        TESSERA_RETURN_IF_ERROR(SkipComment("*/", /*must_end=*/true));
      } else {
        break;
      }
    }
    return absl::OkStatus();
  }

  absl::Status SkipComment(absl::string_view end, bool must_end) {
    const JsonPosition start = position_;
    if (must_end) AdvanceAscii(2);  // so that /*/ does not end itself
    while (!AtEnd() && !absl::StartsWith(Rest(), end)) {
      const int length = Utf8Length(Rest());
      if (length == 0) return FaultHere(absl::StrCat("unexpected ", Seen()));
      Advance(length);
    }
    if (AtEnd()) {
      return must_end ? Fault(start, "this comment does not end")
                      : absl::OkStatus();
    }
    AdvanceAscii(end.size());
    return absl::OkStatus();
  }

  absl::Status ReadValue(JsonValue& value) {
    if (++num_values_ > limits_.max_values) {
      return FaultHere(absl::StrCat("the text has more than ",
                                    limits_.max_values, " values"));
    }
    value.position = position_;
    const char c = Peek();
    if (c == '{') return ReadObject(value);
    if (c == '[') return ReadArray(value);
    if (c == '-' || IsDigit(c)) return ReadNumber(value);
    if (c != '"') return ReadWord(value);
    value.kind = JsonKind::kString;
    return ReadString(value.text);
  }

  // Returns the letters, digits and underscores at the cursor.
  absl::string_view Word() const {
    size_t length = 0;
    const absl::string_view rest = Rest();
    while (length < rest.size() &&
           (absl::ascii_isalnum(rest[length]) || rest[length] == '_')) {
      ++length;
    }
    return rest.substr(0, length);
  }

  absl::Status ReadWord(JsonValue& value) {
    const absl::string_view word = Word();
    if (word == "null") {
      value.kind = JsonKind::kNull;
    } else if (word == "true" || word == "false") {
      value.kind = JsonKind::kBool;
      value.boolean = word == "true";
    } else if (IsNoFiniteNumber(word)) {
      return FaultHere(absl::StrCat("expected a value, got ", word,
                                    ": JSON has finite numbers alone"));
    } else if (!word.empty()) {
      return FaultHere(absl::StrCat("expected a value, got ", word,
                                    "; strings need double quotes"));
    } else {
      return FaultHere(absl::StrCat("expected a value, got ", Seen()));
    }
    AdvanceAscii(word.size());
    return absl::OkStatus();
  }

  // Reads -?(0|[1-9][0-9]*)(.[0-9]+)?([eE][+-]?[0-9]+)?
  absl::Status ReadNumber(JsonValue& value) {
    const size_t start = offset_;
    if (Peek() == '-') Advance();
    if (IsNoFiniteNumber(Word())) return ReadWord(value);  // -Infinity
    const bool leading_zero = Peek() == '0';
    const size_t integer_start = offset_;
    TESSERA_RETURN_IF_ERROR(SkipDigits());
    if (leading_zero && offset_ - integer_start > 1) {
      return Fault(value.position, "a number must not start with 0");
    }
    if (Peek() == '.') {
      Advance();
      TESSERA_RETURN_IF_ERROR(SkipDigits());
    }
    if (Peek() == 'e' || Peek() == 'E') {
      Advance();
      if (Peek() == '+' || Peek() == '-') Advance();
      TESSERA_RETURN_IF_ERROR(SkipDigits());
    }
    value.kind = JsonKind::kNumber;
    value.text = std::string(text_.substr(start, offset_ - start));
    const Decimal decimal = ReadDecimal(value.text, &value.number);
    if (decimal == Decimal::kRight) return absl::OkStatus();
    return Fault(value.position, FaultOf(value.text, decimal));
  }

  absl::Status SkipDigits() {
    if (!IsDigit(Peek())) {
      return FaultHere(absl::StrCat("expected a digit, got ", Seen()));
    }
    while (IsDigit(Peek())) Advance();
    return absl::OkStatus();
  }

  // Reads from the opening quote to behind the closing one.
  absl::Status ReadString(std::string& out) {
    const JsonPosition start = position_;
    Advance();
    for (;;) {
      if (AtEnd()) return Fault(start, "this string does not end");
      const char c = Peek();
      if (c == '"') break;
      if (c == '\n')
        return Fault(start, "this string does not end on its line");
      if (c == '\\') {
        TESSERA_RETURN_IF_ERROR(ReadEscape(out));
        continue;
      }
      const int length =
          static_cast<unsigned char>(c) < 0x20 ? 0 : Utf8Length(Rest());
      if (length == 0) {
        return FaultHere(absl::StrCat("unexpected ", Seen(), " in a string"));
      }
      out.append(Rest().data(), static_cast<size_t>(length));
      Advance(length);
    }
    Advance();
    return absl::OkStatus();
  }

  absl::Status ReadEscape(std::string& out) {
    const JsonPosition start = position_;
    Advance();
    const char c = Peek();
    if (c == 'u') return ReadUnicodeEscape(start, out);
    constexpr absl::string_view kNames = "\"\\/bfnrt";
    constexpr absl::string_view kValues = "\"\\/\b\f\n\r\t";
    const size_t index = AtEnd() ? kNames.npos : kNames.find(c);
    if (index == kNames.npos) {
      return Fault(start, absl::StrCat("unknown escape: \\ before ", Seen()));
    }
    out.push_back(kValues[index]);
    Advance();
    return absl::OkStatus();
  }

  // Reads an escape; the cursor is at the u of "\uXXXX".
  absl::Status ReadUnicodeEscape(JsonPosition start, std::string& out) {
    uint32_t code = 0;
    TESSERA_RETURN_IF_ERROR(ReadHex4(code));
    if (IsHighSurrogate(code)) {
      uint32_t low = 0;
      if (!absl::StartsWith(Rest(), "\\u")) {
        return Fault(start, "a high surrogate without its low one");
      }
      Advance();
      TESSERA_RETURN_IF_ERROR(ReadHex4(low));
      if (!IsLowSurrogate(low)) {
        return Fault(start, "a high surrogate without its low one");
      }
      code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
    } else if (IsLowSurrogate(code)) {
      return Fault(start, "a low surrogate without its high one");
    }
    AppendUtf8(code, out);
    return absl::OkStatus();
  }

  absl::Status ReadHex4(uint32_t& code) {
    Advance();  // the u
    for (int i = 0; i < 4; ++i) {
      if (!absl::ascii_isxdigit(static_cast<unsigned char>(Peek()))) {
        return FaultHere(
            absl::StrCat("expected four hex digits after \\u, got ", Seen()));
      }
      const char c = absl::ascii_tolower(static_cast<unsigned char>(Peek()));
      code =
          code << 4 | static_cast<uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
      Advance();
    }
    return absl::OkStatus();
  }

  absl::Status Enter() {
    if (++depth_ > limits_.max_depth) {
      return FaultHere(
          absl::StrCat("nested deeper than ", limits_.max_depth, " levels"));
    }
    Advance();  // the bracket
    return SkipBlank();
  }

  // Ends an element: steps over the comma, or stays at `close`.
  absl::Status EndElement(char close) {
    TESSERA_RETURN_IF_ERROR(SkipBlank());
    if (Peek() == close) return absl::OkStatus();
    if (Peek() != ',') {
      return FaultHere(
          absl::StrFormat("expected ',' or '%c', got %s", close, Seen()));
    }
    Advance();
    return SkipBlank();
  }

  absl::Status ReadArray(JsonValue& value) {
    value.kind = JsonKind::kArray;
    TESSERA_RETURN_IF_ERROR(Enter());
    while (Peek() != ']') {
      value.elements.emplace_back();
      TESSERA_RETURN_IF_ERROR(ReadValue(value.elements.back()));
      TESSERA_RETURN_IF_ERROR(EndElement(']'));
    }
    Advance();
    --depth_;
    return absl::OkStatus();
  }

  absl::Status ReadObject(JsonValue& value) {
    value.kind = JsonKind::kObject;
    TESSERA_RETURN_IF_ERROR(Enter());
    absl::flat_hash_map<std::string, JsonPosition> seen;
    while (Peek() != '}') {
      JsonMember member;
      TESSERA_RETURN_IF_ERROR(ReadKey(member));
      path_.push_back(member.key);
      const auto [first, is_new] =
          seen.emplace(member.key, member.key_position);
      if (!is_new) {
        TESSERA_RETURN_IF_ERROR(Repeated(member, first->second));
      }
      TESSERA_RETURN_IF_ERROR(SkipBlank());
      TESSERA_RETURN_IF_ERROR(ReadValue(member.value));
      path_.pop_back();
      if (is_new) value.members.push_back(std::move(member));
      TESSERA_RETURN_IF_ERROR(EndElement('}'));
    }
    Advance();
    --depth_;
    return absl::OkStatus();
  }

  absl::Status Repeated(const JsonMember& member, JsonPosition first) {
    if (duplicates_ == nullptr) {
      return Fault(
          member.key_position,
          absl::StrCat("duplicate key '", absl::Utf8SafeCEscape(member.key),
                       "', first at ", first.line, ":", first.column));
    }
    duplicates_->push_back({absl::Utf8SafeCEscape(absl::StrJoin(path_, ".")),
                            member.key_position, first});
    return absl::OkStatus();
  }

  // Reads `"key":`. REQUIRES: the cursor is not at blank.
  absl::Status ReadKey(JsonMember& member) {
    member.key_position = position_;
    if (Peek() != '"') {
      return FaultHere(
          absl::StrCat("expected a key in double quotes, got ", Seen()));
    }
    TESSERA_RETURN_IF_ERROR(ReadString(member.key));
    TESSERA_RETURN_IF_ERROR(SkipBlank());
    if (Peek() != ':') {
      return FaultHere(absl::StrCat("expected ':' after the key '",
                                    absl::Utf8SafeCEscape(member.key),
                                    "', got ", Seen()));
    }
    Advance();
    return absl::OkStatus();
  }

  absl::string_view text_;
  absl::string_view file_name_;
  const JsonLimits& limits_;
  std::vector<JsonDuplicate>* const duplicates_;
  std::vector<std::string> path_;  // keys
  size_t offset_ = 0;
  JsonPosition position_;
  int depth_ = 0;
  int64_t num_values_ = 0;
};

}  // namespace

absl::StatusOr<JsonValue> ReadJson(absl::string_view text,
                                   absl::string_view file_name,
                                   const JsonLimits& limits,
                                   std::vector<JsonDuplicate>* duplicates) {
  return Parser(text, file_name, limits, duplicates).Parse();
}

}  // namespace tessera
