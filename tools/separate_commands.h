// The commands of `tessera` that are programs of their own: `tessera plan`
// needs libtorch, and `tessera tokenize` SentencePiece, which cannot be linked
// with protobuf. What they take stands here, so that `tessera` helps with them.
#ifndef TOOLS_SEPARATE_COMMANDS_H_
#define TOOLS_SEPARATE_COMMANDS_H_

#include <functional>

#include "base/command/command_line.h"

namespace tessera {

// `run`: what the command does in this program.
Command PlanCommand(std::function<int(CommandCall*)> run);
Command TokenizeCommand(std::function<int(CommandCall*)> run);

}  // namespace tessera
#endif  // TOOLS_SEPARATE_COMMANDS_H_
