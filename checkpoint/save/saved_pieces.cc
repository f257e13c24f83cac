#include "checkpoint/save/saved_pieces.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "base/check.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "c10/core/impl/VirtualGuardImpl.h"

namespace tessera {
namespace {

constexpr int64_t kCopyBytes = 4 << 20;  // of one task of a thread
constexpr int64_t kAlign = 64;

struct Task {
  char* to;
  const char* from;
  int64_t bytes;
};

const char* BytesOf(const at::Tensor& tensor) {
  return static_cast<const char*>(tensor.const_data_ptr());
}

int64_t Aligned(const at::Tensor& tensor) {
  const int64_t bytes = static_cast<int64_t>(tensor.nbytes());
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

void AddTasks(char* to, const at::Tensor& from, std::vector<Task>* tasks) {
  const int64_t bytes = static_cast<int64_t>(from.nbytes());
  for (int64_t at = 0; at < bytes; at += kCopyBytes) {
    tasks->push_back(
        {to + at, BytesOf(from) + at, std::min(kCopyBytes, bytes - at)});
  }
}

void Run(const std::vector<Task>& tasks) {
  at::parallel_for(0, static_cast<int64_t>(tasks.size()), 1,
                   [&](int64_t begin, int64_t end) {
                     for (int64_t i = begin; i < end; ++i) {
                       const Task& task = tasks[static_cast<size_t>(i)];
                       std::memcpy(task.to, task.from,
                                   static_cast<size_t>(task.bytes));
                     }
                   });
}

}  // namespace

void AwaitDevices(const std::vector<SavedPiece>& pieces) {
  for (const SavedPiece& piece : pieces) {
    if (!piece.elements.defined()) continue;
    const at::Device device = piece.elements.device();
    if (device.is_cpu()) continue;
    c10::impl::VirtualGuardImpl(device.type())
        .synchronizeDevice(device.index());
    return;
  }
}

SavedPieces::SavedPieces(std::vector<SavedPiece> pieces)
    : pieces_(std::move(pieces)), copies_(pieces_.size()) {}

absl::Status SavedPieces::CopyNow(bool all, CopyMemory* memory) {
  TorchScope scope;
  std::vector<size_t> copied;
  int64_t bytes = 0;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    Copy& copy = copies_[i];
    const at::Tensor& from = pieces_[i].elements;
    if (copy.made || copy.written || !from.defined() || pieces_[i].own ||
        (!all && pieces_[i].lasts)) {
      continue;
    }
    copied.push_back(i);
    if (!from.is_cpu()) {
      TESSERA_RETURN_IF_ERROR(CatchTorch("copy of the state", [&] {
        copy.pinned = at::empty(
            from.sizes(), from.options().device(at::kCPU).pinned_memory(true));
        copy.pinned.copy_(from);
      }));
      continue;
    }
    copy.at = bytes;
    bytes += Aligned(from);
  }
  if (copied.empty()) return absl::OkStatus();  // not the first Detach, say
  TESSERA_ASSIGN_OR_RETURN(*memory, CopyMemory::Allocate(bytes));
  std::vector<Task> tasks;
  for (size_t i : copied) {
    Copy& copy = copies_[i];
    copy.made = true;
    if (copy.pinned.defined()) continue;
    copy.memory = memory;
    AddTasks(memory->data() + copy.at, pieces_[i].elements, &tasks);
  }
  Run(tasks);
  return absl::OkStatus();
}

absl::Status SavedPieces::Keep() {
  absl::MutexLock lock(&mutex_);
  kept_ = true;
  return CopyNow(/*all=*/false, &kept_memory_);
}

// Whether some piece that is not written is not in memory.
bool SavedPieces::AnyElsewhere() const {
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (!pieces_[i].elements.defined() && !copies_[i].written) return true;
  }
  return false;
}

void SavedPieces::Detach() {
  absl::MutexLock lock(&mutex_);
  if (abandoned_) return;
  if (!AnyElsewhere() && CopyNow(/*all=*/true, &detached_memory_).ok()) return;
  for (Copy& copy : copies_) {  // what it could get is not used
    if (!copy.made) copy.pinned.reset();
  }
  awaited_ = true;
  mutex_.Await(absl::Condition(
      +[](SavedPieces* self)
           ABSL_NO_THREAD_SAFETY_ANALYSIS { return self->AllWritten(); },
      this));
}

void SavedPieces::Abandon() {
  absl::MutexLock lock(&mutex_);
  abandoned_ = true;
}

bool SavedPieces::abandoned() {
  absl::MutexLock lock(&mutex_);
  return abandoned_;
}

bool SavedPieces::awaited() {
  absl::MutexLock lock(&mutex_);
  return awaited_;
}

absl::StatusOr<absl::string_view> SavedPieces::Part(size_t i, int64_t begin,
                                                    int64_t bytes,
                                                    std::string* scratch) {
  absl::MutexLock lock(&mutex_);
  if (abandoned_) return absl::CancelledError("the save was given up");
  const SavedPiece& of = pieces_[i];
  if (!of.decode) return Kept(i, begin, bytes, scratch);
  constexpr int64_t kNumberBytes = sizeof(float);
  const Range numbers = {begin / kNumberBytes, (begin + bytes) / kNumberBytes};
  TESSERA_CHECK(numbers.begin % of.format.block_numel == 0);
  std::string kept;
  TESSERA_ASSIGN_OR_RETURN(const absl::string_view blocks,
                           Kept(i, of.format.BytesOf(numbers.begin),
                                of.format.BytesOf(numbers.numel()), &kept));
  scratch->resize(static_cast<size_t>(bytes));
  of.decode(blocks.data(), numbers.numel(),
            reinterpret_cast<float*>(scratch->data()));
  return absl::string_view(*scratch);
}

absl::StatusOr<absl::string_view> SavedPieces::Kept(size_t i, int64_t begin,
                                                    int64_t bytes,
                                                    std::string* scratch) {
  const size_t size = static_cast<size_t>(bytes);
  const Copy& copy = copies_[i];
  if (copy.made) {
    const char* const from = copy.memory == nullptr
                                 ? BytesOf(copy.pinned)
                                 : copy.memory->data() + copy.at;
    return absl::string_view(from + begin, size);
  }
  const at::Tensor& live = pieces_[i].elements;
  if (!live.defined()) {
    scratch->resize(size);
    TESSERA_RETURN_IF_ERROR(
        pieces_[i].ReadElsewhere(begin, bytes, scratch->data()));
    return absl::string_view(*scratch);
  }
  if (live.is_cpu() && !kept_) {
    return absl::string_view(BytesOf(live) + begin, size);
  }
  scratch->resize(size);
  if (live.is_cpu()) {
    std::memcpy(scratch->data(), BytesOf(live) + begin, size);
    return absl::string_view(*scratch);
  }
  const int64_t element = static_cast<int64_t>(live.element_size());
  const at::Tensor part = ElementsOver(live, begin / element, bytes / element);
  TESSERA_RETURN_IF_ERROR(CatchTorch("copy of the state", [&] {
    TensorOver(scratch->data(), part.sizes(), part.strides(),
               part.scalar_type(), at::kCPU)
        .copy_(part);
  }));
  return absl::string_view(*scratch);
}

void SavedPieces::Written(size_t i) {
  absl::MutexLock lock(&mutex_);
  Copy& copy = copies_[i];
  if (copy.memory != nullptr) {
    copy.memory->FreeUpTo(copy.at + Aligned(pieces_[i].elements));
  }
  copy.pinned.reset();
  if (!std::exchange(copy.written, true)) ++num_written_;
}

}  // namespace tessera
