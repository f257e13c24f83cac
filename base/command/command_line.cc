#include "base/command/command_line.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/edit_distance.h"

namespace tessera {
namespace {

bool IsHelp(const std::string& word) {
  return word == "--help" || word == "-h";
}

std::string MeantText(const std::string& word,
                      const std::vector<std::string>& known) {
  const std::string nearest = NearestName(word, known);
  return nearest.empty() ? "" : absl::StrCat(", did you mean '", nearest, "'?");
}

// How many words a command takes.
struct Arity {
  explicit Arity(const std::string& arguments) {
    for (const absl::string_view word :
         absl::StrSplit(arguments, ' ', absl::SkipEmpty())) {
      if (absl::StrContains(word, "...")) many = true;
      if (!absl::StartsWith(word, "[")) needed.emplace_back(word);
      ++most;
    }
  }
  bool Takes(size_t count) const {
    return count >= needed.size() && (many || count <= most);
  }
  // Returns ": OUT is missing" if there are some words, but not all.
  std::string MissingText(size_t count) const {
    if (count == 0 || count >= needed.size()) return "";
    return absl::StrCat(
        ": ",
        absl::StrJoin(needed.begin() + static_cast<int64_t>(count),
                      needed.end(), " and "),
        count + 1 == needed.size() ? " is missing" : " are missing");
  }
  std::vector<std::string> needed;
  size_t most = 0;
  bool many = false;
};

std::string Colored(CommandCall::Color color, absl::string_view text) {
  return absl::StrCat("\x1b[", static_cast<int>(color), "m", text, "\x1b[0m");
}

}  // namespace

// ---- CommandCall

std::string CommandCall::Get(const std::string& flag,
                             absl::string_view absent) const {
  const auto found = flags_.find(flag);
  return found == flags_.end() ? std::string(absent) : found->second;
}

bool CommandCall::ReadNumber(const std::string& flag, int64_t least,
                             int64_t* number, int64_t most) {
  if (!Has(flag)) return true;
  int64_t read = 0;
  if (absl::SimpleAtoi(Get(flag), &read) && read >= least && read <= most) {
    *number = read;
    return true;
  }
  const bool no_limit = most == std::numeric_limits<int64_t>::max();
  Misused(absl::StrCat(flag, ": expected a number from ", least,
                       no_limit ? " on" : absl::StrCat(" to ", most), ", got '",
                       Get(flag), "'"));
  return false;
}

bool CommandCall::ReadPositive(const std::string& flag, double* number) {
  if (!Has(flag)) return true;
  double read = 0;
  if (absl::SimpleAtod(Get(flag), &read) && read > 0 && read < 1e9) {
    *number = read;
    return true;
  }
  Misused(absl::StrCat(flag, ": expected a number above 0 and below 1e9, got '",
                       Get(flag), "'"));
  return false;
}

std::ostream* CommandCall::progress() {
  return terminal_.shows_err && !Has("--quiet") ? &err_ : nullptr;
}

std::string CommandCall::InColor(Color color, absl::string_view text) const {
  return terminal_.colors_out ? Colored(color, text) : std::string(text);
}

std::string CommandCall::NameInErr() const {
  return terminal_.colors_err ? Colored(Color::kRed, name_) : name_;
}

std::optional<bool> CommandCall::Confirm(absl::string_view question) {
  if (terminal_.read_line == nullptr) return std::nullopt;
  err_ << question << " [y/N] " << std::flush;
  std::string answer;
  if (!terminal_.read_line(&answer)) {
    err_ << "\n";
    return false;
  }
  answer = absl::AsciiStrToLower(absl::StripAsciiWhitespace(answer));
  return answer == "y" || answer == "yes";
}

int CommandCall::Misused(absl::string_view why) {
  const size_t tool = name_.find(' ');
  err_ << NameInErr() << ": " << why << "\n(`" << name_.substr(0, tool)
       << " help" << name_.substr(std::min(tool, name_.size()))
       << "` tells how)\n";
  return 2;
}

int CommandCall::Failed(const absl::Status& error) {
  err_ << NameInErr() << ": " << error.message() << "\n";
  return 1;
}

// ---- CommandLine

const Command* CommandLine::Find(absl::string_view name) const {
  for (const Command& command : commands_) {
    if (command.name == name) return &command;
  }
  return nullptr;
}

std::vector<const Command*> CommandLine::GroupOf(absl::string_view name) const {
  std::vector<const Command*> group;
  for (const Command& command : commands_) {
    if (absl::StartsWith(command.name, absl::StrCat(name, " "))) {
      group.push_back(&command);
    }
  }
  return group;
}

int CommandLine::Run(const std::vector<std::string>& args, std::ostream* out,
                     std::ostream* err, const CommandTerminal& terminal) const {
  if (args.empty()) {
    *err << Help();
    return 2;
  }
  if (args[0] == "help" || IsHelp(args[0])) {
    return RunHelp({args.begin() + 1, args.end()}, out, err);
  }
  // A command's name has one or two words.
  const Command* command = Find(args[0]);
  size_t begin = 1;
  if (command == nullptr && args.size() > 1) {
    command = Find(absl::StrCat(args[0], " ", args[1]));
    begin = 2;
  }
  if (command == nullptr) {
    if (!GroupOf(args[0]).empty() && args.size() > 1 &&
        (IsHelp(args[1]) || args[1] == "help")) {
      return RunHelp({args[0]}, out, err);
    }
    return Unknown(args, err);
  }
  const bool asks_help =
      std::any_of(args.begin() + static_cast<int64_t>(begin),
                  std::find(args.begin(), args.end(), "--"), IsHelp);
  if (asks_help || (begin < args.size() && args[begin] == "help")) {
    *out << Help(command->name);
    return 0;
  }
  CommandCall call(absl::StrCat(tool_, " ", command->name), out, err, terminal);
  if (!Parse(*command, args, begin, &call)) return 2;
  return command->run(&call);
}

bool CommandLine::Parse(const Command& command,
                        const std::vector<std::string>& args, size_t begin,
                        CommandCall* call) const {
  std::vector<std::string> names;
  for (const CommandFlag& flag : command.flags) names.push_back(flag.name);
  bool flags_end = false;
  for (size_t i = begin; i < args.size(); ++i) {
    if (flags_end || args[i].size() < 2 || args[i][0] != '-') {
      call->words_.push_back(args[i]);
      continue;
    }
    if (args[i] == "--") {
      flags_end = true;
      continue;
    }
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(args[i], absl::MaxSplits('=', 1));
    const bool joined = absl::StrContains(args[i], '=');
    const auto found = std::find(names.begin(), names.end(), parts.first);
    if (found == names.end()) {
      call->Misused(absl::StrCat("unknown flag ", parts.first,
                                 MeantText(parts.first, names)));
      return false;
    }
    const CommandFlag& flag =
        command.flags[static_cast<size_t>(found - names.begin())];
    const bool is_switch = flag.value.empty();
    if (is_switch && joined) {
      call->Misused(absl::StrCat(flag.name, " takes no value"));
      return false;
    }
    if (!is_switch && !joined && i + 1 == args.size()) {
      call->Misused(absl::StrCat(flag.name, " needs a value, ", flag.value));
      return false;
    }
    call->flags_[flag.name] = is_switch ? ""
                              : joined  ? parts.second
                                        : args[++i];
  }
  const Arity arity(command.arguments);
  if (arity.Takes(call->words().size())) return true;
  call->Misused(absl::StrCat(
      "expected ", command.arguments.empty() ? "no words" : command.arguments,
      ", got ",
      call->words().empty()
          ? "nothing"
          : absl::StrCat("'", absl::StrJoin(call->words(), " "), "'"),
      arity.MissingText(call->words().size())));
  return false;
}

int CommandLine::RunHelp(const std::vector<std::string>& names,
                         std::ostream* out, std::ostream* err) const {
  const std::string name = absl::StrJoin(names, " ");
  if (!name.empty() && Find(name) == nullptr && GroupOf(name).empty()) {
    return Unknown(names, err);
  }
  *out << Help(name);
  return 0;
}

// Tells that there is no such command, and which was meant.
int CommandLine::Unknown(const std::vector<std::string>& args,
                         std::ostream* err) const {
  std::vector<std::string> first, second;
  for (const Command& command : commands_) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(command.name, absl::MaxSplits(' ', 1));
    first.push_back(parts.first);
    if (parts.first == args[0]) second.push_back(parts.second);
  }
  if (second.empty()) {
    *err << tool_ << ": unknown command '" << args[0] << "'"
         << MeantText(args[0], first) << "\n(`" << tool_
         << " help` lists all)\n";
    return 2;
  }
  *err << tool_ << " " << args[0] << ": ";
  if (args.size() == 1) {
    *err << "expected a command";
  } else {
    *err << "unknown command '" << args[1] << "'" << MeantText(args[1], second);
  }
  *err << "; there are " << absl::StrJoin(second, ", ") << "\n(`" << tool_
       << " help " << args[0] << "` tells of each)\n";
  return 2;
}

}  // namespace tessera
