// The commands of `tessera` that are programs of their own: `tessera plan`
// needs libtorch, and `tessera tokenize` SentencePiece, which cannot be linked
// with protobuf. What they take stands here, so that `tessera` helps with them.
#ifndef TOOLS_SEPARATE_COMMANDS_H_
#define TOOLS_SEPARATE_COMMANDS_H_

#include <functional>
#include <string>

#include "base/command/command_line.h"

namespace tessera {

// `run`: what the command does in this program.
Command PlanCommand(std::function<int(CommandCall*)> run);
Command TokenizeCommand(std::function<int(CommandCall*)> run);

// Returns the path of a command's own program: in `folder`, where `tessera` is,
// or in ../libexec/tessera/bin, where the archive keeps a program whose
// libraries must not be linked to those of users. Returns "" if it is in
// neither.
std::string FindProgram(const std::string& folder, const std::string& name);

// Returns the error for that.
std::string NoProgram(const std::string& folder, const std::string& name);

}  // namespace tessera
#endif  // TOOLS_SEPARATE_COMMANDS_H_
