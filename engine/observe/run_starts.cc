#include "engine/observe/run_starts.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "config/reader/json_reader.h"
#include "config/reader/utf8.h"

namespace tessera {
namespace {

constexpr size_t kMostStarts = 1000;  // the last ones
constexpr size_t kMostOfCommand = 4096;
constexpr char kMasked[] = "***";

// Returns it as ToJsonText does, so that what was read is found again.
std::string StartText(const RunStart& start) {
  return absl::StrFormat("{\"time\": %.6f, \"world_size\": %d, \"stage\": %d}",
                         start.unix_seconds, start.world_size, start.stage);
}

// Returns the starts of a run.json. Older versions wrote that of one process.
std::vector<std::string> StartsIn(absl::string_view text) {
  std::vector<std::string> starts;
  const auto run = ReadJson(text, "run.json");
  if (!run.ok() || run->kind != JsonKind::kObject) return starts;
  const JsonValue* const list = run->Find("starts");
  if (list != nullptr && list->kind == JsonKind::kArray) {
    for (const JsonValue& start : list->elements) {
      starts.push_back(ToJsonText(start));
    }
    return starts;
  }
  const JsonValue* const time = run->Find("start_time");
  const JsonValue* const ranks = run->Find("world_size");
  const JsonValue* const stage = run->Find("stage");
  if (time != nullptr && ranks != nullptr && stage != nullptr) {
    starts.push_back(absl::StrCat("{\"time\": ", ToJsonText(*time),
                                  ", \"world_size\": ", ToJsonText(*ranks),
                                  ", \"stage\": ", ToJsonText(*stage), "}"));
  }
  return starts;
}

// Returns whether the value of a flag of this name is nobody's business: its
// last word says so, as in "--api_key", "--hf-token" and "comet.apiKey", but
// not in "--max_tokens" and "--key_file".
bool NamesASecret(absl::string_view name) {
  std::string last;
  char before = ' ';
  for (const char c : name) {
    if (!absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
        (absl::ascii_isupper(static_cast<unsigned char>(c)) &&
         absl::ascii_islower(static_cast<unsigned char>(before)))) {
      last.clear();
    }
    if (absl::ascii_isalnum(static_cast<unsigned char>(c))) {
      last += absl::ascii_tolower(static_cast<unsigned char>(c));
    }
    before = c;
  }
  static constexpr absl::string_view kSecrets[] = {
      "key",     "keys",     "apikey", "token",      "secret",
      "secrets", "password", "passwd", "passphrase", "credentials"};
  return std::find(std::begin(kSecrets), std::end(kSecrets), last) !=
         std::end(kSecrets);
}

// Returns the word with "***" in the place of a secret: --api_key=x, and
// --set=comet.api_key=x.
std::string WithoutSecret(absl::string_view word) {
  size_t begin = 0;
  for (size_t equals = word.find('='); equals != word.npos;
       equals = word.find('=', begin)) {
    if (NamesASecret(word.substr(begin, equals - begin))) {
      return absl::StrCat(word.substr(0, equals + 1), kMasked);
    }
    begin = equals + 1;
  }
  return std::string(word);
}

}  // namespace

std::string StartsJson(absl::string_view earlier, const RunStart& start) {
  std::vector<std::string> starts = StartsIn(earlier);
  starts.push_back(StartText(start));
  if (starts.size() > kMostStarts) {
    starts.erase(starts.begin(), starts.end() - kMostStarts);
  }
  return absl::StrCat("[", absl::StrJoin(starts, ",\n  "), "]");
}

std::string WithEnd(absl::string_view run_json, const RunStart& start,
                    const RunEnd& end) {
  const std::string begun = StartText(start);
  const size_t at = run_json.rfind(begun);
  if (at == run_json.npos) return "";
  const size_t brace = at + begun.size() - 1;
  return absl::StrCat(
      run_json.substr(0, brace),
      absl::StrFormat(", \"end\": \"%s\", \"end_time\": %.6f, \"step\": %d",
                      end.how, end.unix_seconds, end.step),
      run_json.substr(brace));
}

std::string CommandText(absl::string_view cmdline) {
  std::vector<std::string> words;
  bool is_secret = false;  // the value of the flag before: --token x
  for (absl::string_view given :
       absl::StrSplit(cmdline, '\0', absl::SkipEmpty())) {
    const bool is_flag = absl::StartsWith(given, "-");
    const std::string word = is_secret && !absl::StartsWith(given, "--")
                                 ? kMasked
                                 : WithoutSecret(given);
    is_secret =
        is_flag && !absl::StrContains(given, '=') && NamesASecret(given);
    const bool plain =
        std::all_of(word.begin(), word.end(), [](unsigned char c) {
          return absl::ascii_isalnum(c) ||
                 absl::string_view("-_=./,:+@%").find(static_cast<char>(c)) !=
                     absl::string_view::npos;
        });
    words.push_back(plain ? word : absl::StrCat("'", word, "'"));
  }
  const std::string text = absl::StrJoin(words, " ");
  std::string out;
  for (absl::string_view rest = text; !rest.empty();) {
    const int length = Utf8Length(rest);
    const size_t bytes = static_cast<size_t>(std::max(length, 1));
    if (out.size() + bytes > kMostOfCommand) return absl::StrCat(out, " ...");
    absl::StrAppend(&out, length == 0 ? "?" : rest.substr(0, bytes));
    rest.remove_prefix(bytes);
  }
  return out;
}

}  // namespace tessera
