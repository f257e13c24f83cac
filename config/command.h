// `tessera config` shows the completed configuration, or what is wrong with it.
#ifndef CONFIG_COMMAND_H_
#define CONFIG_COMMAND_H_

#include <ostream>
#include <string>
#include <vector>

namespace tessera {

// Runs the command. `args` are the words after `tessera config`. Returns the
// exit status: 0, 1 if a configuration is wrong (or two differ), 2 if the
// command is wrong.
int RunConfigCommand(const std::vector<std::string>& args, std::ostream* out,
                     std::ostream* err);

}  // namespace tessera
#endif  // CONFIG_COMMAND_H_
