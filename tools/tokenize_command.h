// `tessera tokenize` turns text files into a file of tokens
// (data/text/token_file.h).
#ifndef TOOLS_TOKENIZE_COMMAND_H_
#define TOOLS_TOKENIZE_COMMAND_H_

#include <ostream>
#include <string>
#include <vector>

namespace tessera {

// Runs the command. `args` are the words after `tessera tokenize`. Returns the
// exit status: 0, 1 if a file is wrong, 2 if the command is wrong.
int RunTokenizeCommand(const std::vector<std::string>& args, std::ostream* out,
                       std::ostream* err);

}  // namespace tessera
#endif  // TOOLS_TOKENIZE_COMMAND_H_
