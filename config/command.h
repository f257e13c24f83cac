// The commands `tessera config ...`.
#ifndef CONFIG_COMMAND_H_
#define CONFIG_COMMAND_H_

#include <vector>

#include "base/command/command_line.h"

namespace tessera {

// Their exit status: 0; 1 for faults of a file, or differences; 2 for wrong
// words.
std::vector<Command> ConfigCommands();

}  // namespace tessera
#endif  // CONFIG_COMMAND_H_
