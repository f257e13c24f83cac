// CommandLine is a command-line tool with subcommands. Each is a row of data,
// of which its parser, its help, the manual page and the shells' completion
// are made.
//
// absl's flags are for programs: they know no subcommands, and end the process
// with 1 at a fault, which for `diff` means that two things differ.
#ifndef BASE_COMMAND_COMMAND_LINE_H_
#define BASE_COMMAND_COMMAND_LINE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/command/command_terminal.h"

namespace tessera {

class CommandCall;

struct CommandFlag {
  std::string name;   // "--world"
  std::string value;  // the word for its value in the help; empty: a switch
  std::string help;   // one or two sentences
};

struct Command {
  std::string name;       // "config check"
  std::string arguments;  // "FILE", "A B", "FILE... OUT", "[RUN]"
  std::string summary;    // a sentence
  std::string details;    // more sentences; may be empty
  std::vector<CommandFlag> flags;
  std::vector<std::string> examples;  // without the tool's name
  // Returns the exit status: 0; 1 for a fault, or a difference; 2 if the words
  // are wrong (CommandCall::Misused).
  std::function<int(CommandCall*)> run;
};

// CommandCall is what a subcommand was called with.
class CommandCall {
 public:
  enum class Color { kRed = 31, kGreen = 32, kYellow = 33 };

  CommandCall(std::string name, std::ostream* out, std::ostream* err,
              CommandTerminal terminal = {})
      : name_(std::move(name)),
        out_(*out),
        err_(*err),
        terminal_(std::move(terminal)) {}

  const std::vector<std::string>& words() const { return words_; }
  bool Has(const std::string& flag) const { return flags_.count(flag) > 0; }
  // Returns a flag's value, the last one that was given.
  std::string Get(const std::string& flag, absl::string_view absent = "") const;
  // Reads a flag's value, a number from `least` to `most`; `*number` stays if
  // there is none. Returns false after telling what is wrong: return 2 then.
  bool ReadNumber(const std::string& flag, int64_t least, int64_t* number,
                  int64_t most = std::numeric_limits<int64_t>::max());
  // Does what ReadNumber does, with a number above 0.
  bool ReadPositive(const std::string& flag, double* number);

  std::ostream& out() { return out_; }
  std::ostream& err() { return err_; }
  // Returns where progress is shown, for those who watch a terminal and have
  // not said --quiet; null otherwise.
  std::ostream* progress();
  // Returns the text for out(), in a color if that is a terminal.
  std::string InColor(Color color, absl::string_view text) const;
  // Asks a question, to which "y" and "yes" mean true. Returns nullopt, without
  // asking, if there is no terminal.
  std::optional<bool> Confirm(absl::string_view question);
  // Tells what is wrong with the words, and where the help is. Returns 2.
  int Misused(absl::string_view why);
  // Tells the error, without its code. Returns 1.
  int Failed(const absl::Status& error);

 private:
  friend class CommandLine;
  std::string NameInErr() const;

  const std::string name_;  // "tessera config check"
  std::ostream& out_;
  std::ostream& err_;
  const CommandTerminal terminal_;
  std::vector<std::string> words_;
  std::map<std::string, std::string> flags_;
};

class CommandLine {
 public:
  // `tool`: "tessera". Commands are listed in the order of `commands`; those of
  // one group ("config check", "config diff") are neighbours.
  CommandLine(std::string tool, std::vector<Command> commands)
      : tool_(std::move(tool)), commands_(std::move(commands)) {}

  // Runs what `args`, the words after the tool's name, ask for, and returns the
  // exit status. It answers `help`, `help COMMAND`, `--help` and `-h` itself,
  // tells of wrong words what may have been meant, and takes values as
  // `--flag=value` and `--flag value`; what follows `--` is no flag.
  // `terminal`: what `out` and `err` are.
  int Run(const std::vector<std::string>& args, std::ostream* out,
          std::ostream* err, const CommandTerminal& terminal = {}) const;

  // Returns the help: of all commands, of a group, or of one command, whose
  // name this is.
  std::string Help(absl::string_view name = "") const;
  // Returns the sections SYNOPSIS, DESCRIPTION and EXAMPLES of a manual page.
  std::string ManualPage(absl::string_view description) const;
  // Returns a script of bash, which zsh reads after bashcompinit.
  std::string Completion() const;

 private:
  const Command* Find(absl::string_view name) const;
  std::vector<const Command*> GroupOf(absl::string_view name) const;
  bool Parse(const Command& command, const std::vector<std::string>& args,
             size_t begin, CommandCall* call) const;
  int RunHelp(const std::vector<std::string>& names, std::ostream* out,
              std::ostream* err) const;
  int Unknown(const std::vector<std::string>& args, std::ostream* err) const;
  std::string Usage(const Command& command) const;

  const std::string tool_;
  const std::vector<Command> commands_;
};

}  // namespace tessera
#endif  // BASE_COMMAND_COMMAND_LINE_H_
