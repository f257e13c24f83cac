// Checks that a command's output has reached its destination.
#ifndef TOOLS_WRITTEN_H_
#define TOOLS_WRITTEN_H_

#include <iostream>

namespace tessera {

// Returns `code`, a command's exit status; or 1, with a line on stderr, if some
// of its output could not be written.
inline int Written(int code) {
  std::cout.flush();
  if (std::cout) return code;
  std::cerr << "stdout: not all of the output could be written (is a disk "
               "full?)\n";
  return code == 0 ? 1 : code;
}

}  // namespace tessera
#endif  // TOOLS_WRITTEN_H_
