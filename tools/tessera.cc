// The command `tessera`; see kUsage in config/command.cc.
#include <iostream>
#include <string>
#include <vector>

#include "config/command.h"

int main(int argc, char** argv) {
  const std::vector<std::string> args(argv + 1, argv + argc);
  if (args.empty() || args[0] != "config") {
    std::cerr << "tessera knows one command: tessera config\n";
    return args.empty() ? 2
                        : tessera::RunConfigCommand({}, &std::cout, &std::cerr);
  }
  return tessera::RunConfigCommand({args.begin() + 1, args.end()}, &std::cout,
                                   &std::cerr);
}
