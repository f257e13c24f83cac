// CommandTerminal is what a command may do with the terminal that it is called
// on.
#ifndef BASE_COMMAND_COMMAND_TERMINAL_H_
#define BASE_COMMAND_COMMAND_TERMINAL_H_

#include <functional>
#include <string>

namespace tessera {

// The default is no terminal: no progress, no colors, no questions.
struct CommandTerminal {
  bool shows_err = false;   // the command's errors, and its progress
  bool colors_out = false;  // its output may have colors
  bool colors_err = false;
  // Reads an answer to a question; returns false at the end of the input.
  // Absent if nobody can answer.
  std::function<bool(std::string*)> read_line;
};

// Returns what this process's standard streams are. Nobody can answer unless
// both the input and stderr, where questions stand, are terminals. NO_COLOR or
// TERM=dumb turns colors off.
CommandTerminal StandardTerminal();

}  // namespace tessera
#endif  // BASE_COMMAND_COMMAND_TERMINAL_H_
