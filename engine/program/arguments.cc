#include "engine/program/arguments.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/edit_distance.h"
#include "base/status.h"
#include "engine/program/help_text.h"

namespace tessera {
namespace {

constexpr char kSeeHelp[] = "; --help lists the flags";

absl::Status FlagError(absl::string_view flag, absl::string_view expected,
                       absl::string_view value) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, ": expected ", expected, ", got '", value, "'"));
}

// What a value of the flag has to be; "" where absl has to say it.
absl::string_view Expected(const absl::CommandLineFlag& flag) {
  if (flag.IsOfType<bool>()) return "true or false";
  if (flag.IsOfType<float>() || flag.IsOfType<double>()) return "a number";
  if (flag.IsOfType<int32_t>() || flag.IsOfType<int64_t>()) {
    return "a whole number";
  }
  if (flag.IsOfType<uint32_t>() || flag.IsOfType<uint64_t>()) {
    return "a whole number, at least 0";
  }
  return "";
}

// Goes through the words that Init leaves. Why absl does not read them by
// itself: it ends the process with code 1, says nothing of Init's flags, and
// offers no name for one that is misspelt. What is given to absl afterwards has
// been read once, so it only makes of it what it does with its own flags.
class Reader {
 public:
  Reader(std::vector<char*> words, const StartOptions& options)
      : words_(std::move(words)), options_(options) {}

  absl::Status Read(Arguments* found);

 private:
  absl::Status ReadFlag(absl::string_view word, Arguments* found);
  absl::Status ReadProgramFlag(absl::string_view name, Arguments* found);
  absl::Status Positional(char* word, Arguments* found);
  absl::Status Unknown(absl::string_view word, absl::string_view name) const;
  // The value of the flag at hand: behind the '=', or the next word.
  absl::StatusOr<std::string> Value(absl::string_view name);
  bool OwnsConfig() const {
    return options_.reads_config &&
           absl::FindCommandLineFlag("config") == nullptr;
  }

  const std::vector<char*> words_;
  const StartOptions& options_;
  size_t at_ = 0;                      // the word at hand
  std::optional<std::string> behind_;  // its '='
  std::vector<std::string> absls_;     // "--name=value" each
};

absl::Status Reader::Read(Arguments* found) {
  absls_ = {words_[0]};
  bool flags_ended = false;
  for (at_ = 1; at_ < words_.size(); ++at_) {
    const absl::string_view word = words_[at_];
    if (flags_ended || word.size() < 2 || word[0] != '-') {
      TESSERA_RETURN_IF_ERROR(Positional(words_[at_], found));
    } else if (word == "--") {
      flags_ended = true;
    } else {
      TESSERA_RETURN_IF_ERROR(ReadFlag(word, found));
    }
  }
  std::vector<char*> pointers;
  for (std::string& each : absls_) pointers.push_back(each.data());
  absl::ParseCommandLine(static_cast<int>(pointers.size()), pointers.data());
  return absl::OkStatus();
}

absl::Status Reader::ReadFlag(absl::string_view word, Arguments* found) {
  absl::string_view name = word;
  absl::ConsumePrefix(&name, "-");
  absl::ConsumePrefix(&name, "-");
  behind_.reset();
  if (const size_t equals = name.find('='); equals != name.npos) {
    behind_ = std::string(name.substr(equals + 1));
    name = name.substr(0, equals);
  }
  if (name == "set" && absl::FindCommandLineFlag("set") == nullptr) {
    TESSERA_ASSIGN_OR_RETURN(std::string value, Value("set"));
    if (!absl::StrContains(value, '=')) {
      return FlagError("set", "KEY=VALUE, as zero_optimization.stage=1", value);
    }
    found->set.push_back(std::move(value));
    return absl::OkStatus();
  }
  if (name == "config" && OwnsConfig()) {
    TESSERA_ASSIGN_OR_RETURN(std::string value, Value("config"));
    if (value.empty()) return FlagError("config", "a file", value);
    found->config = std::move(value);
    return absl::OkStatus();
  }
  return ReadProgramFlag(name, found);
}

absl::Status Reader::ReadProgramFlag(absl::string_view name, Arguments* found) {
  const absl::string_view word = words_[at_], written = name;
  absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  std::string value;
  if (flag != nullptr && flag->IsOfType<bool>()) {
    value = behind_.value_or("true");
  } else if (flag != nullptr) {
    TESSERA_ASSIGN_OR_RETURN(value, Value(name));
  } else if (absl::ConsumePrefix(&name, "no") && !behind_.has_value()) {
    flag = absl::FindCommandLineFlag(name);
    if (flag != nullptr && !flag->IsOfType<bool>()) flag = nullptr;
    value = "false";
  }
  if (flag == nullptr) return Unknown(word, written);
  std::string reason;
  if (!IsOfAbsl(*flag) && !flag->ParseFrom(value, &reason)) {
    const absl::string_view expected = Expected(*flag);
    if (!expected.empty()) return FlagError(name, expected, value);
    return absl::InvalidArgumentError(absl::StrCat("--", name, ": ", reason));
  }
  if (name == "config" && options_.reads_config && !value.empty()) {
    found->config = value;
  }
  absls_.push_back(absl::StrCat("--", name, "=", value));
  return absl::OkStatus();
}

absl::StatusOr<std::string> Reader::Value(absl::string_view name) {
  if (behind_.has_value()) return *std::move(behind_);
  if (at_ + 1 < words_.size() && !absl::StartsWith(words_[at_ + 1], "--")) {
    return std::string(words_[++at_]);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, ": expected a value"));
}

absl::Status Reader::Positional(char* word, Arguments* found) {
  if (options_.positional) {
    found->positional.push_back(word);
    return absl::OkStatus();
  }
  const bool is_config = absl::EndsWith(word, ".json") && options_.reads_config;
  return absl::InvalidArgumentError(absl::StrCat(
      "unexpected argument '", word, "'",
      is_config ? absl::StrCat(" (did you mean --config=", word, "?)") : "",
      kSeeHelp));
}

absl::Status Reader::Unknown(absl::string_view word,
                             absl::string_view name) const {
  std::vector<std::string> names = {"help", "set"};
  if (options_.reads_config) names.push_back("config");
  for (const InitFlag& flag : InitFlags()) names.push_back(flag.name);
  for (const absl::CommandLineFlag* flag : FlagsOf("")) {
    names.push_back(std::string(flag->Name()));
  }
  const std::string meant = NearestName(name, names);
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown flag ", word.substr(0, word.find('=')),
      meant.empty() ? "" : absl::StrCat(" (did you mean --", meant, "?)"),
      kSeeHelp));
}

}  // namespace

absl::Status CheckFlagNames(const std::vector<InitFlag>& taken) {
  for (const InitFlag& flag : taken) {
    const absl::CommandLineFlag* const own =
        absl::FindCommandLineFlag(flag.name);
    if (own == nullptr) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the flag --", flag.name, " of ", own->Filename(),
                     " has the name of one of Init's; give it another name"));
  }
  return absl::OkStatus();
}

std::string ProgramName(int argc, char* const* argv) {
  const absl::string_view path = argc > 0 ? argv[0] : "program";
  return std::string(path.substr(path.rfind('/') + 1));
}

absl::StatusOr<Arguments> ReadArguments(int argc, char** argv,
                                        const StartOptions& options,
                                        absl::string_view file) {
  Arguments found;
  for (int i = 1; i < argc && absl::string_view(argv[i]) != "--"; ++i) {
    absl::string_view word = argv[i];
    if (!absl::ConsumePrefix(&word, "-")) continue;
    absl::ConsumePrefix(&word, "-");
    if (word != "help" && word != "h" && word != "helpfull") continue;
    found.help = HelpText(ProgramName(argc, argv), options,
                          word == "helpfull" ? "" : file);
    return found;
  }
  TESSERA_RETURN_IF_ERROR(CheckFlagNames(InitFlags()));
  TESSERA_ASSIGN_OR_RETURN(InitArguments init, SplitInitFlags(argc, argv));
  found.world = init.world;
  found.plan_world = init.plan_world;
  TESSERA_RETURN_IF_ERROR(Reader(std::move(init.rest), options).Read(&found));
  return found;
}

}  // namespace tessera
