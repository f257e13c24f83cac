#include "checkpoint/together.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "checkpoint/aside.h"

namespace tessera {
namespace {

// This is far below any timeout of a collective.
constexpr absl::Duration kBeat = absl::Milliseconds(500);
constexpr char kBusy[] = "busy";

absl::Status Meet(Communicator* comm, absl::string_view what, Aside* work) {
  while (true) {
    const bool over = work->Done(kBeat);
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<std::string> all,
        comm->AllGatherStrings(over ? StatusToText(work->status()) : kBusy,
                               CommTag{absl::StrCat(what)}));
    bool busy = false;
    for (const std::string& one : all) busy |= one == kBusy;
    if (!busy) return comm->AgreeOk(work->status(), what);
  }
}

}  // namespace

absl::Status RunTogether(Communicator* comm, absl::string_view what,
                         const std::function<absl::Status()>& work) {
  Aside aside(what, work);
  return CatchTorch(what, [&] { return Meet(comm, what, &aside); });
}

}  // namespace tessera
