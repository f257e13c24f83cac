#include "loader/data_loader.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/thread/wait_clock.h"
#include "base/torch_guard.h"
#include "comm/communicator.h"
#include "loader/batch_maker.h"
#include "loader/batch_queue.h"
#include "loader/device_copies.h"

namespace tessera {
namespace {

constexpr absl::string_view kHead = "tessera-loader 1 ";

absl::Status CheckOptions(const DataLoaderOptions& options) {
  const auto at_least = [](absl::string_view what, int64_t least, int64_t got) {
    if (got >= least) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "loader: ", what, ": expected ", least, " or more, got ", got));
  };
  TESSERA_RETURN_IF_ERROR(at_least("batch_size", 1, options.batch_size));
  TESSERA_RETURN_IF_ERROR(at_least("workers", 0, options.workers));
  TESSERA_RETURN_IF_ERROR(at_least("prefetch", 0, options.prefetch));
  TESSERA_RETURN_IF_ERROR(
      at_least("prefetch_bytes", 0, options.prefetch_bytes));
  TESSERA_RETURN_IF_ERROR(
      at_least("device_prefetch", 0, options.device_prefetch));
  if (!*options.pin_memory) return absl::OkStatus();
  // Errors appear here instead of at the first batch.
  return CatchTorch("loader: pin_memory", [] {
    at::empty({1}, at::TensorOptions(at::kByte).pinned_memory(true));
  });
}

}  // namespace

class DataLoader::Impl {
 public:
  Impl(std::unique_ptr<SampleOrder> order, Fetch fetch,
       const DataLoaderOptions& options)
      : options_(options),
        maker_(std::move(order), std::move(fetch), options),
        place_(maker_.place()) {}

  absl::Status Start();
  absl::StatusOr<Batch> Next();
  absl::StatusOr<Batch> NextOnAll(Communicator& comm);
  std::string State() const {
    return absl::StrCat(kHead, "seed=", options_.seed, " ", place_.state);
  }
  absl::Status Load(absl::string_view state);
  absl::Status SetEpoch(int64_t epoch) {
    return Go([&] { return maker_.SetEpoch(epoch); });
  }
  int64_t epoch() const { return place_.epoch; }
  DataLoaderStats stats() const;

 private:
  // Moves the order by `move`, and drops what was made ahead.
  absl::Status Go(absl::FunctionRef<absl::Status()> move);
  std::unique_ptr<DrawnBatch> Take();
  void CopyAhead();
  void Count(const Batch& batch, int64_t times);
  void CountWait(absl::Duration waited);

  const DataLoaderOptions options_;
  BatchMaker maker_;
  OrderPlace place_;  // after what was delivered
  // The place after the batch in place of which an error was returned.
  std::optional<OrderPlace> behind_error_;
  std::optional<DeviceCopies> copies_;
  std::unique_ptr<BatchQueue> queue_;  // null without workers
  // Only the consumer writes these.
  std::atomic<int64_t> batches_{0}, samples_{0}, bytes_{0}, errors_{0};
  std::atomic<int64_t> waited_nanos_{0}, ready_{0};
};

absl::Status DataLoader::Impl::Start() {
  if (!options_.device.is_cpu()) {
    TESSERA_RETURN_IF_ERROR(
        CatchTorch(absl::StrCat("loader: device ", options_.device.str()),
                   [&] { copies_.emplace(options_.device); }));
  }
  if (options_.workers == 0) return absl::OkStatus();
  BatchQueueLimits limits;
  limits.workers = options_.workers;
  limits.depth = static_cast<size_t>(QueueDepth(options_));
  limits.bytes = options_.prefetch_bytes;
  TESSERA_ASSIGN_OR_RETURN(queue_, BatchQueue::Start(&maker_, limits));
  return absl::OkStatus();
}

// Without workers each batch is made here, and all of that time is a wait.
std::unique_ptr<DrawnBatch> DataLoader::Impl::Take() {
  if (queue_ != nullptr) {
    BatchQueue::Taken taken = queue_->Take();
    CountWait(taken.waited);
    ready_.fetch_add(taken.ready, std::memory_order_relaxed);
    return std::move(taken.drawn);
  }
  static constexpr std::atomic<bool> kNotCancelled{false};
  auto drawn = std::make_unique<DrawnBatch>();
  const absl::Duration before = maker_.making();
  maker_.Draw(drawn.get());
  maker_.Make(drawn.get(), &kNotCancelled);
  CountWait(maker_.making() - before);
  return drawn;
}

// Copies the ready ones of the batches after the delivered one: so a slow batch
// delays only itself, and workers do not need the device.
void DataLoader::Impl::CopyAhead() {
  for (int i = 0; i < options_.device_prefetch; ++i) {
    DrawnBatch* const next = queue_->Ready(static_cast<size_t>(i));
    if (next == nullptr) return;
    copies_->Start(next);
  }
}

absl::StatusOr<Batch> DataLoader::Impl::Next() {
  if (behind_error_.has_value()) {
    place_ = *std::move(behind_error_);
    behind_error_.reset();
  }
  std::unique_ptr<DrawnBatch> drawn = Take();
  if (copies_.has_value()) {
    copies_->Start(drawn.get());
    if (queue_ != nullptr) CopyAhead();
    copies_->Finish(drawn.get());
  }
  if (!drawn->status.ok()) {
    errors_.fetch_add(1, std::memory_order_relaxed);
    behind_error_ = std::move(drawn->behind);
    return std::move(drawn->status);
  }
  place_ = std::move(drawn->behind);
  Count(drawn->batch, 1);
  return std::move(drawn->batch);
}

// A rank whose batch is good goes back to where the others are.
absl::StatusOr<Batch> DataLoader::Impl::NextOnAll(Communicator& comm) {
  OrderPlace before = behind_error_.value_or(place_);
  absl::StatusOr<Batch> batch = Next();
  const absl::Status agreed = comm.AgreeOk(batch.status(), "data");
  if (agreed.ok()) return batch;
  if (batch.ok()) {
    Count(*batch, -1);
    errors_.fetch_add(1, std::memory_order_relaxed);
    behind_error_ = std::exchange(place_, std::move(before));
  }
  return agreed;
}

void DataLoader::Impl::CountWait(absl::Duration waited) {
  const int64_t nanos = absl::ToInt64Nanoseconds(waited);
  waited_nanos_.fetch_add(nanos, std::memory_order_relaxed);
  AddDataWait(nanos);
}

void DataLoader::Impl::Count(const Batch& batch, int64_t times) {
  const auto samples = static_cast<int64_t>(batch.samples.size());
  batches_.fetch_add(times, std::memory_order_relaxed);
  samples_.fetch_add(times * samples, std::memory_order_relaxed);
  bytes_.fetch_add(times * batch.bytes, std::memory_order_relaxed);
}

absl::Status DataLoader::Impl::Go(absl::FunctionRef<absl::Status()> move) {
  const auto go = [&] {
    TESSERA_RETURN_IF_ERROR(move());
    place_ = maker_.place();
    behind_error_.reset();
    return absl::OkStatus();
  };
  return queue_ == nullptr ? go() : queue_->Restart(go);
}

absl::Status DataLoader::Impl::Load(absl::string_view state) {
  absl::string_view rest = state;
  uint64_t seed = 0;
  size_t space = 0;
  if (!absl::ConsumePrefix(&rest, kHead) ||
      !absl::ConsumePrefix(&rest, "seed=") ||
      (space = rest.find(' ')) == absl::string_view::npos ||
      !absl::SimpleAtoi(rest.substr(0, space), &seed)) {
    return absl::DataLossError(absl::StrCat("loader: expected a state as '",
                                            State(), "', got '", state, "'"));
  }
  if (seed != options_.seed) {
    return absl::FailedPreconditionError(absl::StrCat(
        "loader: saved with seed ", seed, ", but here it is ", options_.seed));
  }
  rest.remove_prefix(space + 1);
  return Go([&] { return maker_.Seek(rest); });
}

DataLoaderStats DataLoader::Impl::stats() const {
  const auto load = [](const std::atomic<int64_t>& number) {
    return number.load(std::memory_order_relaxed);
  };
  DataLoaderStats stats;
  stats.batches = load(batches_);
  stats.samples = load(samples_);
  stats.bytes = load(bytes_);
  stats.errors = load(errors_);
  stats.waited = absl::Nanoseconds(load(waited_nanos_));
  stats.fetching = maker_.making();
  const int64_t taken = stats.batches + stats.errors;
  if (taken > 0) {
    stats.ready =
        static_cast<double>(load(ready_)) / static_cast<double>(taken);
  }
  return stats;
}

DataLoader::DataLoader(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
DataLoader::~DataLoader() = default;

absl::StatusOr<std::unique_ptr<DataLoader>> DataLoader::Create(
    std::unique_ptr<SampleOrder> order, Fetch fetch,
    const DataLoaderOptions& options) {
  if (order == nullptr || fetch == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("loader: expected ",
                     order == nullptr ? "an order" : "a Fetch", ", got none"));
  }
  DataLoaderOptions complete = options;
  if (!complete.pin_memory.has_value()) {
    complete.pin_memory = !options.device.is_cpu();
  }
  TESSERA_RETURN_IF_ERROR(CheckOptions(complete));
  auto impl =
      std::make_unique<Impl>(std::move(order), std::move(fetch), complete);
  TESSERA_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<DataLoader>(new DataLoader(std::move(impl)));
}

absl::StatusOr<Batch> DataLoader::Next() { return impl_->Next(); }
absl::StatusOr<Batch> DataLoader::NextOnAll(Communicator& comm) {
  return impl_->NextOnAll(comm);
}
std::string DataLoader::State() const { return impl_->State(); }
absl::Status DataLoader::Load(absl::string_view state) {
  return impl_->Load(state);
}
absl::Status DataLoader::SetEpoch(int64_t epoch) {
  return impl_->SetEpoch(epoch);
}
int64_t DataLoader::epoch() const { return impl_->epoch(); }
DataLoaderStats DataLoader::stats() const { return impl_->stats(); }

}  // namespace tessera
