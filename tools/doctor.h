// `tessera doctor` looks at what this machine offers a training, and says what
// to change. No torch.
#ifndef TOOLS_DOCTOR_H_
#define TOOLS_DOCTOR_H_

#include <string>
#include <vector>

#include "base/command/command_line.h"

namespace tessera {

struct Finding {
  enum class Grade { kGood, kSlow, kBad };
  Grade grade;
  std::string what;    // "io_uring"
  std::string text;    // what was seen
  std::string advice;  // what to change; "" for kGood
};

// Looks at processors, memory, limits, the loopback interface, devices,
// libtorch, io_uring and the disk of `folder`. `root` is put before /proc and
// /sys, for tests. LOCAL.
std::vector<Finding> Examine(const std::string& folder,
                             const std::string& root = "");

// Its exit status is 1 if a finding is kBad.
Command DoctorCommand();

}  // namespace tessera
#endif  // TOOLS_DOCTOR_H_
