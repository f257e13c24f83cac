// RunMain (engine/program/start.h).
#include <cstdio>
#include <string>

#include "base/torch_guard.h"
#include "engine/program/arguments.h"
#include "engine/program/start.h"

namespace tessera {

int RunMain(int argc, char** argv, absl::Status (*run)(int argc, char** argv)) {
  // Into a file, too: a scheduler ends programs, and what is in a buffer is
  // lost then.
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string program = ProgramName(argc, argv);
  const absl::Status status =
      CatchTorch("uncaught exception", [&] { return run(argc, argv); });
  if (!status.ok()) {
    std::fflush(stdout);
    // The launcher of --world writes what several ranks end with once
    // (comm/launch/final_lines.h).
    std::fprintf(stderr, "%s: %s\n", program.c_str(),
                 status.ToString().c_str());
  }
  Shutdown();
  return status.ok() ? 0 : 1;
}

}  // namespace tessera
