#include "loader/batch_maker.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/DeviceGuard.h"
#include "c10/core/GradMode.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

namespace tessera {
namespace {

constexpr size_t kNamedSamples = 8;

// Returns "loader: batch 3 (4 samples of epoch 0: 5, 2, 9, 1)".
std::string Describe(const Batch& batch) {
  std::string text = absl::StrCat("loader: batch ", batch.number);
  const std::vector<Sample>& samples = batch.samples;
  if (samples.empty()) return text;
  const int64_t first = samples.front().epoch, last = samples.back().epoch;
  absl::StrAppend(&text, " (", samples.size(),
                  samples.size() == 1 ? " sample" : " samples", " of epoch ",
                  first, first == last ? "" : absl::StrCat(" to ", last), ": ");
  for (size_t i = 0; i < std::min(samples.size(), kNamedSamples); ++i) {
    absl::StrAppend(&text, i == 0 ? "" : ", ", samples[i].index);
  }
  return absl::StrCat(text, samples.size() > kNamedSamples ? ", ...)" : ")");
}

}  // namespace

absl::Status BatchMaker::PassShortEnd() {
  const int64_t size = options_.batch_size;
  if (options_.epoch_end != EpochEnd::kDrop || order_->LeftInEpoch() >= size) {
    return absl::OkStatus();
  }
  TESSERA_RETURN_IF_ERROR(order_->SetEpoch(order_->epoch() + 1));
  if (order_->LeftInEpoch() >= size) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "loader: an epoch has ", order_->LeftInEpoch(), " samples for this rank,",
      " no batch of ", size, ", and EpochEnd::kDrop drops them all"));
}

absl::Status BatchMaker::DrawSamples(Batch* batch) {
  TESSERA_RETURN_IF_ERROR(PassShortEnd());
  const int64_t epoch = order_->epoch();
  int64_t count = options_.batch_size;
  if (options_.epoch_end != EpochEnd::kContinue) {
    count = std::min(count, order_->LeftInEpoch());
  }
  batch->samples = order_->NextBatch(count);
  // This comes at once, so that epoch() does not say that the epoch continues.
  TESSERA_RETURN_IF_ERROR(PassShortEnd());
  batch->ends_epoch = order_->epoch() != epoch;
  return absl::OkStatus();
}

void BatchMaker::Draw(DrawnBatch* drawn) {
  drawn->batch.number = drawn_++;
  drawn->status = CatchTorch(Describe(drawn->batch),
                             [&] { return DrawSamples(&drawn->batch); });
  drawn->behind = place();
}

absl::Status BatchMaker::Seek(absl::string_view state) {
  TESSERA_RETURN_IF_ERROR(order_->Seek(state));
  drawn_ = 0;
  return absl::OkStatus();
}

absl::Status BatchMaker::SetEpoch(int64_t epoch) {
  TESSERA_RETURN_IF_ERROR(order_->SetEpoch(epoch));
  drawn_ = 0;
  return absl::OkStatus();
}

// Whether a worker calls it or the program with guards of its own, the same
// operators run.
absl::Status BatchMaker::MakeTensors(Batch* batch,
                                     const std::atomic<bool>* cancelled) {
  const c10::AutoGradMode no_gradients(false);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(
      c10::autocast_dispatch_keyset);
  // Pinning creates a context on the current device.
  const c10::OptionalDeviceGuard device(
      options_.device.is_cpu() ? std::nullopt
                               : std::optional<c10::Device>(options_.device));
  std::vector<int64_t> indices;
  indices.reserve(batch->samples.size());
  for (const Sample& sample : batch->samples) indices.push_back(sample.index);
  const bool pins = options_.pin_memory.value();
  const BatchContext context(options_.seed, batch->samples,
                             pins ? nullptr : &pool_, cancelled);
  TESSERA_ASSIGN_OR_RETURN(batch->tensors, fetch_(indices, context));
  for (at::Tensor& tensor : batch->tensors) {
    if (!tensor.defined()) continue;
    if (pins && tensor.is_cpu()) tensor = tensor.pin_memory();
    batch->bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return absl::OkStatus();
}

void BatchMaker::Make(DrawnBatch* drawn, const std::atomic<bool>* cancelled) {
  if (!drawn->status.ok()) return;
  const absl::Duration begin = MonotonicNow();
  drawn->status = CatchTorch(
      "fetch", [&] { return MakeTensors(&drawn->batch, cancelled); });
  if (!drawn->status.ok()) {
    drawn->batch.tensors.clear();
    drawn->batch.bytes = 0;
    drawn->status = Annotate(drawn->status, Describe(drawn->batch));
  }
  making_nanos_.fetch_add(absl::ToInt64Nanoseconds(MonotonicNow() - begin),
                          std::memory_order_relaxed);
}

}  // namespace tessera
