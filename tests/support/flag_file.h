// Raises flags between the ranks of a test, outside of any group, as files. So
// nobody has to sleep for as long as another may take.
//
//   rank 0   Reduce() ... it has failed; RaiseFlag(folder + "/0")
//   rank 1   AwaitFlag(folder + "/0")    and comes to nothing meanwhile
#ifndef TESTS_SUPPORT_FLAG_FILE_H_
#define TESTS_SUPPORT_FLAG_FILE_H_

#include <unistd.h>

#include <fstream>
#include <string>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace tessera {

inline void RaiseFlag(const std::string& path) { std::ofstream{path}; }

// Returns false if the flag is not raised within `patience`.
inline bool AwaitFlag(const std::string& path,
                      absl::Duration patience = absl::Seconds(30)) {
  const absl::Time deadline = absl::Now() + patience;
  while (access(path.c_str(), F_OK) != 0) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return true;
}

}  // namespace tessera
#endif  // TESTS_SUPPORT_FLAG_FILE_H_
