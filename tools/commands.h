// All commands of `tessera`, as a table.
#ifndef TOOLS_COMMANDS_H_
#define TOOLS_COMMANDS_H_

#include <functional>
#include <vector>

#include "base/command/command_line.h"

namespace tessera {

// What runs the commands that are programs of their own (separate_commands.h).
struct SeparateRuns {
  std::function<int(CommandCall*)> plan, tokenize;
};

// Returns the table, in the order of the help. Their words are in
// config/command.cc, checkpoint/exchange/command.cc, report/command.cc,
// doctor.cc and separate_commands.cc.
std::vector<Command> TesseraCommands(const SeparateRuns& runs);

}  // namespace tessera
#endif  // TOOLS_COMMANDS_H_
