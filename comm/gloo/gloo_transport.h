// The transport of CPU ranks (and, through host memory, of GPU ranks that
// have nothing better): c10d's Gloo carries the bytes, the sums are ours.
//
// reduce-scatter: every rank sends each peer its slice, pieces are summed in
//   rank order as they arrive. all-reduce: that, then an all-gather of slices;
//   small ones in a single exchange. Same bits either way.
//
// Receive buffers are kept, and hold 4 MiB at most, whatever the size of the
// tensors (with more than 33 ranks 128 KiB for each peer).
#ifndef COMM_GLOO_GLOO_TRANSPORT_H_
#define COMM_GLOO_GLOO_TRANSPORT_H_

#include <memory>

#include "absl/status/statusor.h"
#include "c10/util/intrusive_ptr.h"
#include "comm/gloo/gloo_links.h"
#include "comm/transport.h"

namespace tessera {

// COLLECTIVE, blocking. `store` must hold keys of this group only (wrap it in a
// c10d::PrefixStore). Returns Unavailable or DeadlineExceeded.
absl::StatusOr<std::shared_ptr<Transport>> ConnectGlooTransport(
    const c10::intrusive_ptr<c10d::Store>& store,
    const GlooTransportOptions& options);

}  // namespace tessera
#endif  // COMM_GLOO_GLOO_TRANSPORT_H_
