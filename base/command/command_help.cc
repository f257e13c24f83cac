// The help, the manual page and the completion of a CommandLine.
#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/command/command_line.h"
#include "base/command/help_layout.h"

namespace tessera {
namespace {

std::string FlagText(const CommandFlag& flag) {
  return flag.value.empty() ? flag.name
                            : absl::StrCat(flag.name, " ", flag.value);
}

// For troff.
std::string Escaped(absl::string_view text) {
  std::string escaped =
      absl::StrReplaceAll(text, {{"\\", "\\e"}, {"-", "\\-"}});
  if (absl::StartsWith(escaped, ".") || absl::StartsWith(escaped, "'")) {
    escaped.insert(0, "\\&");
  }
  return escaped;
}

}  // namespace

// Flags are not broken from their values.
std::string CommandLine::Usage(const Command& command) const {
  const std::string begin =
      absl::StrCat("usage: ", tool_, " ", command.name, " ");
  std::string words = command.arguments;
  for (const CommandFlag& flag : command.flags) {
    absl::StrAppend(&words, " [",
                    absl::StrReplaceAll(FlagText(flag), {{" ", "\x01"}}), "]");
  }
  return absl::StrReplaceAll(
      absl::StrCat(begin, WrapText(words, begin.size(), begin.size()), "\n"),
      {{"\x01", " "}});
}

std::string CommandLine::Help(absl::string_view name) const {
  if (const Command* const command = Find(name)) {
    std::string help = Usage(*command);
    absl::StrAppend(&help, "\n", WrapText(command->summary, 0, 0), "\n");
    if (!command->details.empty()) {
      absl::StrAppend(&help, WrapText(command->details, 0, 0), "\n");
    }
    if (!command->flags.empty()) help += "\n";
    for (const CommandFlag& flag : command->flags) {
      help += HelpRow(FlagText(flag), flag.help);
    }
    if (!command->examples.empty()) help += "\nexamples:\n";
    for (const std::string& example : command->examples) {
      absl::StrAppend(&help, "  ", tool_, " ", example, "\n");
    }
    return help;
  }
  const std::vector<const Command*> group = GroupOf(name);
  std::string help = absl::StrCat("usage: ", tool_, " ", name,
                                  name.empty() ? "" : " ", "COMMAND ...\n\n");
  for (const Command& command : commands_) {
    if (!group.empty() &&
        std::find(group.begin(), group.end(), &command) == group.end()) {
      continue;
    }
    help += HelpRow(command.name, command.summary);
  }
  absl::StrAppend(&help, "\n`", tool_,
                  " help COMMAND` tells all of one, with examples.\n");
  return help;
}

std::string CommandLine::ManualPage(absl::string_view description) const {
  std::string synopsis = ".SH SYNOPSIS\n", commands, examples;
  for (const Command& command : commands_) {
    absl::StrAppend(&synopsis, ".SY \"", tool_, " ", command.name, "\"\n");
    if (!command.arguments.empty()) {
      absl::StrAppend(&synopsis, ".I ", Escaped(command.arguments), "\n");
    }
    for (const CommandFlag& flag : command.flags) {
      absl::StrAppend(&synopsis, ".OP ", Escaped(flag.name), " ",
                      Escaped(flag.value), "\n");
    }
    synopsis += ".YS\n";
    absl::StrAppend(&commands, ".SS ", tool_, " ", command.name, " ",
                    Escaped(command.arguments), "\n", Escaped(command.summary),
                    "\n");
    if (!command.details.empty()) {
      absl::StrAppend(&commands, Escaped(command.details), "\n");
    }
    for (const CommandFlag& flag : command.flags) {
      absl::StrAppend(&commands, ".TP\n.B ", Escaped(FlagText(flag)), "\n",
                      Escaped(flag.help), "\n");
    }
    for (const std::string& example : command.examples) {
      absl::StrAppend(&examples, tool_, " ", Escaped(example), "\n");
    }
  }
  return absl::StrCat(synopsis, ".SH DESCRIPTION\n", Escaped(description), "\n",
                      commands, ".SH EXAMPLES\n.EX\n", examples, ".EE\n");
}

std::string CommandLine::Completion() const {
  std::set<std::string> first = {"help"};
  std::string cases;
  for (const Command& command : commands_) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(command.name, absl::MaxSplits(' ', 1));
    if (first.insert(parts.first).second && !parts.second.empty()) {
      std::vector<std::string> second;
      for (const Command* const of : GroupOf(parts.first)) {
        second.push_back(of->name.substr(parts.first.size() + 1));
      }
      absl::StrAppend(&cases, "    ", parts.first, ") words=\"",
                      absl::StrJoin(second, " "), "\" ;;\n");
    }
    std::vector<std::string> flags = {"--help"};
    for (const CommandFlag& flag : command.flags) flags.push_back(flag.name);
    // A command of one word may begin with that of another.
    absl::StrAppend(
        &cases, "    \"", command.name, "\"",
        parts.second.empty() ? absl::StrCat("|\"", command.name, " \"*") : "*",
        ") words=\"", absl::StrJoin(flags, " "), "\" ;;\n");
  }
  const std::string function = absl::StrCat("_", tool_);
  return absl::StrCat(
      function, "() {\n  local words=\"\" at=$COMP_CWORD\n",
      "  local current=\"${COMP_WORDS[at]}\"\n",
      "  case \"${COMP_WORDS[*]:1:at-1}\" in\n    \"\"|help) words=\"",
      absl::StrJoin(first, " "), "\" ;;\n", cases, "  esac\n",
      "  COMPREPLY=($(compgen -W \"$words\" -- \"$current\"))\n",
      "  if [[ $current != -* && $at -gt 1 ]]; then\n",
      "    COMPREPLY+=($(compgen -f -- \"$current\"))\n  fi\n}\n",
      "complete -o filenames -F ", function, " ", tool_, "\n");
}

}  // namespace tessera
