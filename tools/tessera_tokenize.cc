// `tessera tokenize` is a separate program: `tessera` has protobuf, which
// cannot be linked with SentencePiece (data/sentencepiece/BUILD).
#include <iostream>
#include <string>
#include <vector>

#include "base/command/command_line.h"
#include "base/command/command_terminal.h"
#include "tools/separate_commands.h"
#include "tools/tokenize_command.h"
#include "tools/written.h"

int main(int argc, char** argv) {
  const tessera::CommandLine tool(
      "tessera", {tessera::TokenizeCommand(tessera::RunTokenize)});
  std::vector<std::string> args(argv + 1, argv + argc);
  args.insert(args.begin(), "tokenize");
  return tessera::Written(
      tool.Run(args, &std::cout, &std::cerr, tessera::StandardTerminal()));
}
