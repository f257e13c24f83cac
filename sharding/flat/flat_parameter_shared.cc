// Units whose working copy is shared by the ranks of a host.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/torch/storage_access.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

std::string FaultMessage(const std::string& parameter,
                         const std::string& flat) {
  return absl::StrCat(
      "[", flat, "] a write through a raw pointer into parameter '", parameter,
      "', whose memory the ranks of this host share and may only read. Write "
      "with an operator, or hold `auto pin = tessera::Use(w);` around the "
      "write and ask for the pointer within.");
}

}  // namespace

absl::Status FlatParameter::AllocateShared() {
  char* const read = options_.shared->readable() + options_.shared_offset;
  char* const write = options_.shared->writable() + options_.shared_offset;
  const auto item = static_cast<int64_t>(c10::elementSize(dtype_));
  TESSERA_ASSIGN_OR_RETURN(
      shard_, FlatBuffer::Over(write + owned_.begin * item, owned_.numel(),
                               dtype_, MemoryKind::kParameters));
  std::vector<WriteFaults::Piece> pieces;
  for (const Parameter& p : params_) {
    pieces.push_back({read + p.range.begin * item, read + p.range.end * item,
                      FaultMessage(p.name, name_)});
  }
  write_faults_ = std::make_unique<WriteFaults>(std::move(pieces));
  DropPrivate();
  return absl::OkStatus();
}

void FlatParameter::DropPrivate() {
  auto whole =
      FlatBuffer::Over(options_.shared->readable() + options_.shared_offset,
                       layout_.whole_numel(), dtype_, std::nullopt);
  SetWhole(*std::move(whole));  // not counted, so not refused
  if (std::exchange(private_, false)) PointAll();
}

absl::Status FlatParameter::PrepareWrite() {
  if (!shared()) {
    dirty_.store(true, std::memory_order_relaxed);
    return absl::OkStatus();
  }
  absl::MutexLock lock(&mutex_);
  if (life_ != Life::kOwned) return absl::OkStatus();
  if (!private_) {
    TorchScope scope;
    TESSERA_RETURN_IF_ERROR(Settle());
    TESSERA_ASSIGN_OR_RETURN(
        FlatBuffer mine,
        FlatBuffer::Allocate(layout_.whole_numel(), dtype_, device_,
                             MemoryKind::kWorking, Fill::kNone));
    CopyBytes(device_, mine.data(), whole_.data(), mine.bytes());
    SetWhole(std::move(mine));
    private_ = true;
    PointAll();
  }
  dirty_ = true;
  return absl::OkStatus();
}

absl::Status FlatParameter::AwaitOthers(const CommFuture& written) {
  if (!shared()) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  if (private_) return absl::OkStatus();  // reads nothing that is shared
  HideAll();
  ready_ = false;
  arriving_ = written;
  return options_.overlap ? absl::OkStatus() : Settle();
}

}  // namespace tessera
