#include "checkpoint/together.h"

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/thread/monotonic_wait.h"
#include "base/thread/start_thread.h"
#include "base/torch_guard.h"

namespace tessera {
namespace {

// This is far below any timeout of a collective.
constexpr absl::Duration kBeat = absl::Milliseconds(500);
constexpr char kBusy[] = "busy";

absl::Status Meet(Communicator* comm, absl::string_view what,
                  const MonotonicNotification& done, const absl::Status& mine) {
  while (true) {
    const bool over = done.WaitFor(kBeat);
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> all,
        comm->AllGatherStrings(over ? StatusToText(mine) : kBusy,
                               CommTag{absl::StrCat(what)}));
    bool busy = false;
    for (const std::string& one : all) busy |= one == kBusy;
    if (!busy) return comm->AgreeOk(mine, what);
  }
}

}  // namespace

absl::Status RunTogether(Communicator* comm, absl::string_view what,
                         const std::function<absl::Status()>& work) {
  absl::Status mine;
  MonotonicNotification done;
  const auto run = [&] {
    mine = CatchTorch(what, [&] { return work(); });
    done.Notify();
  };
  absl::StatusOr<std::thread> thread = StartThread("tessera-disk", run);
  if (!thread.ok()) {
    mine = thread.status();
    done.Notify();
  }
  const absl::Status all =
      CatchTorch(what, [&] { return Meet(comm, what, done, mine); });
  if (thread.ok()) thread->join();
  return all;
}

}  // namespace tessera
