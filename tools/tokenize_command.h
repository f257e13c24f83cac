// `tessera tokenize`: text files to a file of tokens (data/text/token_file.h).
#ifndef TOOLS_TOKENIZE_COMMAND_H_
#define TOOLS_TOKENIZE_COMMAND_H_

#include <ostream>
#include <string>
#include <vector>

namespace tessera {

// `args`: what stands after `tessera tokenize`. Returns the exit status: 0, 1
// if a file is wrong, 2 if the command is.
int RunTokenizeCommand(const std::vector<std::string>& args, std::ostream* out,
                       std::ostream* err);

}  // namespace tessera
#endif  // TOOLS_TOKENIZE_COMMAND_H_
