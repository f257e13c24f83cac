// RunTokenize turns text files into a file of tokens (data/text/token_file.h):
// `tessera tokenize`.
#ifndef TOOLS_TOKENIZE_COMMAND_H_
#define TOOLS_TOKENIZE_COMMAND_H_

#include "base/command/command_line.h"

namespace tessera {

// Runs TokenizeCommand (tools/separate_commands.h). Returns the exit status: 1
// if a file is wrong.
int RunTokenize(CommandCall* call);

}  // namespace tessera
#endif  // TOOLS_TOKENIZE_COMMAND_H_
