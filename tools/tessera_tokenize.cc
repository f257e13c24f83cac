// `tessera tokenize` is a separate program: `tessera` has protobuf, which
// cannot be linked with SentencePiece (data/sentencepiece/BUILD).
#include <iostream>
#include <string>
#include <vector>

#include "tools/tokenize_command.h"
#include "tools/written.h"

int main(int argc, char** argv) {
  return tessera::Written(tessera::RunTokenizeCommand(
      std::vector<std::string>(argv + 1, argv + argc), &std::cout, &std::cerr));
}
