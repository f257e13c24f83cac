#include "loader/device_copies.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/stream/stream_uses.h"
#include "base/torch_guard.h"
#include "c10/core/StreamGuard.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace tessera {

DeviceCopies::DeviceCopies(c10::Device device)
    : stream_(c10::impl::VirtualGuardImpl(device.type())
                  .getStreamFromGlobalPool(device)) {}

void DeviceCopies::Guarded(DrawnBatch* drawn,
                           absl::FunctionRef<void()> body) const {
  const absl::Status status =
      CatchTorch(absl::StrCat("loader: batch ", drawn->batch.number,
                              ", copy to ", stream_.device().str()),
                 body);
  if (status.ok()) return;
  drawn->status = status;
  drawn->batch.tensors.clear();
}

void DeviceCopies::Start(DrawnBatch* drawn) const {
  if (drawn->on_device || !drawn->status.ok()) return;
  drawn->on_device = true;
  Guarded(drawn, [&] {
    const c10::StreamGuard guard(stream_);
    std::vector<at::Tensor> copies = drawn->batch.tensors;
    for (at::Tensor& tensor : copies) {
      if (!tensor.defined()) continue;
      tensor = tensor.to(stream_.device(), /*non_blocking=*/true);
    }
    drawn->batch.tensors = std::move(copies);
    drawn->copied = StreamPoint::Now(stream_.device());
  });
}

void DeviceCopies::Finish(DrawnBatch* drawn) const {
  if (!drawn->on_device || !drawn->status.ok()) return;
  Guarded(drawn, [&] {
    drawn->copied.Order();
    for (const at::Tensor& tensor : drawn->batch.tensors) {
      if (tensor.defined()) KeepForCurrentStream(tensor);
    }
  });
}

}  // namespace tessera
