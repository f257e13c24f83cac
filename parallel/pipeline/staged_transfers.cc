// How values come from one stage to another. A message says what it is of, so
// that ranks whose programs differ end in an error, and not in other numbers.
#include <cstring>
#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "base/monotonic.h"
#include "base/torch/storage_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "parallel/pipeline/program_print.h"
#include "parallel/pipeline/staged_run.h"
#include "sharding/trace/meta_call.h"

namespace tessera {
namespace {

constexpr int64_t kHeader = 64;  // bytes; what follows stays aligned

uint64_t DescriptionOf(const at::Tensor& tensor, const std::string& what) {
  std::vector<uint64_t> words = {PrintOf(what)};
  for (const int64_t size : tensor.sizes()) words.push_back(size);
  for (const int64_t stride : tensor.strides()) words.push_back(stride);
  words.push_back(tensor.storage_offset());
  words.push_back(static_cast<uint64_t>(tensor.scalar_type()));
  words.push_back(tensor.storage().nbytes());
  return PrintOfWords(words);
}

at::Tensor Bytes(size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)}, at::kByte);
}

}  // namespace

void StagedRun::Bring(const at::Tensor& tensor, int to,
                      const std::string& what) {
  const StagedStorages::Entry* const entry = storages_.Find(StorageOf(tensor));
  if (entry == nullptr || entry->own || entry->stages.has(to)) return;
  const StageSet stages = entry->stages;
  if (one_way_)
    CheckDirection(stages.NearestTo(to, /*above=*/backward_), to, what);
  BringStorage(tensor.storage(), to, DescriptionOf(tensor, what), what);
}

void StagedRun::CheckDirection(int from, int to,
                               const std::string& what) const {
  if (backward_ ? from > to : from < to) return;
  ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
      what, ": values of stage ", from, " are needed by stage ", to, " in ",
      backward_ ? "backward" : "forward",
      ", against the direction of a pipeline whose stages have several "
      "micro-batches under way; set pipeline.schedule to \"gpipe\", where all "
      "run them in one order, or pipeline.split_points so that both are at one "
      "stage")));
}

void StagedRun::BringStorage(const c10::Storage& storage, int to,
                             uint64_t description, const std::string& what) {
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  const int from = storages_.StagesOf(impl).NearestTo(to, /*above=*/backward_);
  const int64_t key = next_key_++;
  print_ +=
      PrintOfWords({static_cast<uint64_t>(key),
                    description});  // stages run micro-batches in other orders
  storages_.AddStage(impl, to);
  if (stage_ == from) {
    at::Tensor message = Packed(storage, description);
    sent_bytes_ += message.numel();
    links_->Post(to, key, std::move(message));
  } else if (stage_ == to) {
    const c10::impl::ExcludeDispatchKeyGuard unseen{
        c10::DispatchKeySet(kBelowKey)};
    TorchScope scope;
    const at::Tensor message = Bytes(kHeader + storage.nbytes());
    const std::string text = absl::StrCat(what, " in ", doing_);
    const absl::Duration began = MonotonicNow();
    {
      const TraceScope trace(TraceTrack::kMain, "wait for a stage");
      ThrowIfError(links_->Take(from, key, message, text));
    }
    waited_ += MonotonicNow() - began;
    Unpack(message, storage, description, from, text);
  }
}

// A parameter's values are read by an operator, which the engine's own fallback
// sees: they may be elsewhere.
at::Tensor StagedRun::Packed(const c10::Storage& storage,
                             uint64_t description) const {
  const c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  at::Tensor read;
  for (const at::Tensor& p : parameters_) {
    if (StorageOf(p) != impl) continue;
    const c10::impl::ForceDispatchKeyGuard plain(c10::default_included_set,
                                                 c10::default_excluded_set);
    const at::NoGradGuard no_grad;
    read = p.clone();
    break;
  }
  const c10::impl::ExcludeDispatchKeyGuard unseen{
      c10::DispatchKeySet(kBelowKey)};
  TorchScope scope;
  at::Tensor message = Bytes(kHeader + storage.nbytes());
  auto* const bytes = static_cast<char*>(message.mutable_data_ptr());
  std::memset(bytes, 0, kHeader);
  std::memcpy(bytes, &description, sizeof description);
  std::memcpy(bytes + kHeader,
              read.defined() ? read.storage().data() : storage.data(),
              storage.nbytes());
  return message;
}

void StagedRun::Unpack(const at::Tensor& message, const c10::Storage& storage,
                       uint64_t description, int from,
                       const std::string& what) const {
  const auto* const bytes = static_cast<const char*>(message.const_data_ptr());
  uint64_t theirs = 0;
  std::memcpy(&theirs, bytes, sizeof theirs);
  if (theirs != description) {
    ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
        what, ": stage ", from,
        " has sent the values of another tensor than this one, stage ", stage_,
        ", waits for: the ranks of a pipeline must run the same program on the "
        "same sizes")));
  }
  c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  const StagedStorages::Entry* const entry = storages_.Find(impl);
  if (entry == nullptr || !entry->outside || IsHidden(impl)) GiveMemory(impl);
  std::memcpy(storage.mutable_data(), bytes + kHeader, storage.nbytes());
}

// From the last stage on, each from the next one: earlier stages wait for it.
at::Tensor StagedRun::BringEverywhere(const at::Tensor& tensor) {
  constexpr char kResult[] = "a result";
  const StagedStorages::Entry* const entry = storages_.Find(StorageOf(tensor));
  const at::Tensor result =
      entry != nullptr && entry->home >= 0 ? tensor.clone() : tensor;
  for (int to = stages_ - 1; to >= 0; --to) {
    if (storages_.StagesOf(StorageOf(result)).has(to)) continue;
    BringStorage(result.storage(), to, DescriptionOf(result, kResult), kResult);
  }
  storages_.SetEverywhere(StorageOf(result));
  return result;
}

void StagedRun::AddToPrint(uint64_t number) {
  print_ += PrintOfWords({static_cast<uint64_t>(next_key_), number});
}

void StagedRun::EndBatch() {
  for (const c10::Storage& sent : storages_.TakeSentParameters(stage_)) {
    TakeMemory(sent.unsafeGetStorageImpl());
  }
  for (const auto& [storage, order] : storages_.Outside()) {
    const uint64_t description =
        PrintOfWords({static_cast<uint64_t>(order),
                      static_cast<uint64_t>(storage.nbytes())});
    for (int to = 0; to < stages_; ++to) {
      if (storages_.StagesOf(storage.unsafeGetStorageImpl()).has(to)) continue;
      BringStorage(storage, to, description, "a buffer");
    }
    storages_.SetEverywhere(storage.unsafeGetStorageImpl());
  }
  storages_.Sweep();
  nodes_.clear();
}

}  // namespace tessera
