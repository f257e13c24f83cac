#include "base/command/command_terminal.h"

#include <unistd.h>

#include <cstdlib>
#include <iostream>

namespace tessera {
namespace {

std::string Variable(const char* value) { return value ? value : ""; }

}  // namespace

CommandTerminal StandardTerminal() {
  const std::string kind = Variable(std::getenv("TERM"));
  const bool colors = Variable(std::getenv("NO_COLOR")).empty() &&
                      !kind.empty() && kind != "dumb";
  CommandTerminal terminal;
  terminal.shows_err = isatty(STDERR_FILENO) == 1;
  terminal.colors_err = colors && terminal.shows_err;
  terminal.colors_out = colors && isatty(STDOUT_FILENO) == 1;
  if (terminal.shows_err && isatty(STDIN_FILENO) == 1) {
    terminal.read_line = [](std::string* line) {
      return static_cast<bool>(std::getline(std::cin, *line));
    };
  }
  return terminal;
}

}  // namespace tessera
