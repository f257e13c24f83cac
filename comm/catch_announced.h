// CatchAnnounced: CatchTorch for what all ranks do together.
//
// An error that `f` returns is one that all ranks agree on. What it throws (out
// of memory, the user's code) happened on this rank only, somewhere between two
// agreements, and the others would wait for it until their timeout: so it is
// announced, which ends their waits (Communicator::Announce).
#ifndef COMM_CATCH_ANNOUNCED_H_
#define COMM_CATCH_ANNOUNCED_H_

#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/torch_guard.h"
#include "comm/communicator.h"

namespace tessera {

// `f` returns a Status or a StatusOr. LOCAL besides what `f` does.
template <typename F>
auto CatchAnnounced(Communicator* comm, absl::string_view what, F&& f) {
  bool thrown = true;
  auto result = CatchTorch(what, [&] {
    auto returned = f();
    thrown = false;
    return returned;
  });
  if (thrown) {
    if constexpr (std::is_same_v<decltype(result), absl::Status>) {
      comm->Announce(result);
    } else {
      comm->Announce(result.status());
    }
  }
  return result;
}

}  // namespace tessera
#endif  // COMM_CATCH_ANNOUNCED_H_
