// RunMain (engine/program/start.h).
#include <cstdio>
#include <string>

#include "base/log.h"
#include "base/torch_guard.h"
#include "engine/program/arguments.h"
#include "engine/program/start.h"
#include "engine/program/unclosed.h"

namespace tessera {
namespace {

// Without Close the metrics of the last steps may be rank 0's own, and run.json
// says "ended", as of a run that was given up.
void WarnOfUnclosedEngines() {
  if (TakeUnclosedEngines() == 0) return;
  TESSERA_LOG_RANK0(WARNING)
      << "the program ended without Engine::Close: the metrics of the last "
         "steps may lack the other ranks, and run.json tells of a run that "
         "ended and was not finished; call it on each engine when the training "
         "is over, as in `return engine->Close();`";
}

}  // namespace

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
  } else {
    WarnOfUnclosedEngines();
  }
  Shutdown();
  return status.ok() ? 0 : 1;
}

}  // namespace tessera
