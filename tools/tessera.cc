// The command `tessera`; see kUsage in config/command.cc and in
// checkpoint/exchange/command.cc.
#include <iostream>
#include <string>
#include <vector>

#include "checkpoint/exchange/command.h"
#include "config/command.h"

int main(int argc, char** argv) {
  std::vector<std::string> args(argv + 1, argv + argc);
  const std::string command = args.empty() ? "" : args[0];
  if (!args.empty()) args.erase(args.begin());
  if (command == "config") {
    return tessera::RunConfigCommand(args, &std::cout, &std::cerr);
  }
  if (command == "checkpoint") {
    return tessera::RunCheckpointCommand(args, &std::cout, &std::cerr);
  }
  std::cerr << "tessera knows two commands: tessera config, tessera "
               "checkpoint\n";
  tessera::RunConfigCommand({}, &std::cout, &std::cerr);
  tessera::RunCheckpointCommand({}, &std::cout, &std::cerr);
  return 2;
}
