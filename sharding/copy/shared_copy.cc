#include "sharding/copy/shared_copy.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "comm/shared_memory.h"

namespace tessera {
namespace {

std::string FaultMessage(const std::string& parameter,
                         const std::string& flat) {
  return absl::StrCat(
      "[", flat, "] a write through a raw pointer into parameter '", parameter,
      "', whose memory the ranks of this host share and may only read. Write "
      "with an operator (one of your own says in its schema that it writes: "
      "Tensor(a!)), or hold `auto pin = tessera::Use(w);` around the "
      "write and ask for the pointer within.");
}

}  // namespace

absl::StatusOr<std::unique_ptr<WorkingCopy>> SharedCopy::Make(
    const FlatDescription* flat, ShardStates* states) {
  Traits traits;
  traits.shared = true;
  traits.resident_numel = flat->layout().shard_numel();
  auto copy = std::unique_ptr<SharedCopy>(new SharedCopy(flat, states, traits));
  const FlatParameterOptions& options = flat->options();
  const char* const read = options.shared->readable() + options.shared_offset;
  char* const write = options.shared->writable() + options.shared_offset;
  const auto item = static_cast<int64_t>(c10::elementSize(flat->dtype()));
  const Range owned = flat->owned();
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer shard,
      FlatBuffer::Over(write + owned.begin * item, owned.numel(), flat->dtype(),
                       MemoryKind::kParameters));
  states->SetWorking(std::move(shard));  // the others write theirs
  std::vector<WriteFaults::Piece> pieces;
  for (const FlatDescription::Parameter& p : flat->parameters()) {
    pieces.push_back({read + p.range.begin * item, read + p.range.end * item,
                      FaultMessage(p.name, flat->name())});
  }
  copy->write_faults_ = std::make_unique<WriteFaults>(std::move(pieces));
  copy->ReadShared();
  return copy;
}

void SharedCopy::ReadShared() {
  const FlatParameterOptions& options = flat_.options();
  auto whole = FlatBuffer::Over(
      options.shared->readable() + options.shared_offset,
      flat_.layout().whole_numel(), flat_.dtype(), std::nullopt);
  SetWhole(*std::move(whole));  // not counted, so not refused
}

void SharedCopy::Drop() {
  WorkingCopy::Drop();
  private_ = false;
  write_faults_ = nullptr;
}

void SharedCopy::Free() {
  if (!std::exchange(private_, false)) return;
  ReadShared();
}

// The others read what the engine would write to, so a user's write must not go
// there before all ranks have entered an update; and all of them make it.
absl::Status SharedCopy::PrepareWrite() {
  if (private_) return absl::OkStatus();
  TorchScope scope;
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer mine,
      Allocate(whole().numel(), MemoryKind::kWorking, Fill::kNone));
  CopyBytes(flat_.device(), mine.data(), whole().data(), mine.bytes());
  SetWhole(std::move(mine));
  private_ = true;
  return absl::OkStatus();
}

bool SharedCopy::Await(const CommFuture& written) {
  if (private_) return false;  // reads nothing that is shared
  arriving_ = written;
  return true;
}

}  // namespace tessera
