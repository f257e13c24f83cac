#include "base/memory/ledger.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/memory/ledger_watch.h"
#include "base/memory/memory.h"

namespace tessera {
namespace {

std::atomic<LedgerWatch*> g_watch{nullptr};

}  // namespace

void SetLedgerWatch(LedgerWatch* watch) {
  g_watch.store(watch, std::memory_order_release);
}

absl::string_view MemoryKindName(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::kParameters:
      return "parameters";
    case MemoryKind::kGradients:
      return "gradients";
    case MemoryKind::kOptimizer:
      return "optimizer";
    case MemoryKind::kWorking:
      return "working";
    case MemoryKind::kCommunication:
      return "communication";
    case MemoryKind::kOther:
      return "other";
  }
  return "?";
}

std::string MemoryReport::ToString() const {
  std::string text;
  for (int i = 0; i < kNumMemoryKinds; ++i) {
    if (by_kind[i].peak_bytes == 0) continue;
    absl::StrAppend(&text, MemoryKindName(static_cast<MemoryKind>(i)), " ",
                    by_kind[i].current_bytes, " (peak ", by_kind[i].peak_bytes,
                    "), ");
  }
  absl::StrAppend(&text, "total ", total.current_bytes, " (peak ",
                  total.peak_bytes, ")");
  return text;
}

MemoryLedger::MemoryLedger(absl::string_view device, bool watched)
    : device_(device), watched_(watched) {}

MemoryLedger& MemoryLedger::Host() {
  static MemoryLedger* const ledger = new MemoryLedger("cpu", /*watched=*/true);
  return *ledger;
}

MemoryLedger& MemoryLedger::Of(absl::string_view device) {
  if (device == "cpu") return Host();
  struct All {
    absl::Mutex mutex;
    absl::flat_hash_map<std::string, std::unique_ptr<MemoryLedger>> by_device
        ABSL_GUARDED_BY(mutex);
  };
  static All* const all = new All;
  absl::MutexLock lock(&all->mutex);
  auto& ledger = all->by_device[std::string(device)];
  if (ledger == nullptr) {
    ledger.reset(new MemoryLedger(device, /*watched=*/true));
  }
  return *ledger;
}

void MemoryLedger::TellWatch(int64_t change) const {
  if (!watched_) return;
  LedgerWatch* const watch = g_watch.load(std::memory_order_acquire);
  if (watch != nullptr) watch->Changed(*this, change);
}

void MemoryLedger::Raise(Counter& counter, int64_t current_bytes) {
  int64_t peak = counter.peak.load(std::memory_order_relaxed);
  while (peak < current_bytes &&
         !counter.peak.compare_exchange_weak(peak, current_bytes,
                                             std::memory_order_relaxed)) {
  }
}

void MemoryLedger::AddToKind(MemoryKind kind, int64_t bytes) {
  TESSERA_CHECK_GE(bytes, 0);
  Counter& counter = by_kind_[static_cast<int>(kind)];
  Raise(counter, counter.current.fetch_add(bytes) + bytes);
}

void MemoryLedger::Add(MemoryKind kind, int64_t bytes) {
  AddToKind(kind, bytes);
  Raise(total_, total_.current.fetch_add(bytes) + bytes);
  TellWatch(bytes);
}

bool MemoryLedger::TryAdd(MemoryKind kind, int64_t bytes) {
  // Compare-exchange reserves the bytes: a refused request must not show in the
  // peak, nor make a smaller request of another thread fail.
  int64_t current = total_.current.load();
  do {
    if (bytes > 0 &&
        bytes > limit_bytes_.load(std::memory_order_relaxed) - current) {
      return false;
    }
  } while (!total_.current.compare_exchange_weak(current, current + bytes));
  Raise(total_, current + bytes);
  AddToKind(kind, bytes);
  TellWatch(bytes);
  return true;
}

void MemoryLedger::Remove(MemoryKind kind, int64_t bytes) {
  Counter& counter = by_kind_[static_cast<int>(kind)];
  const int64_t before = counter.current.fetch_sub(bytes);
  TESSERA_CHECK_GE(before, bytes) << MemoryKindName(kind);
  total_.current.fetch_sub(bytes);
  TellWatch(-bytes);
}

absl::Status MemoryLedger::Claim(MemoryKind kind, int64_t bytes,
                                 absl::string_view what) {
  if (TryAdd(kind, bytes)) return absl::OkStatus();
  return Refused(bytes, what, LimitText());
}

absl::Status MemoryLedger::Refused(int64_t bytes, absl::string_view what,
                                   absl::string_view why) const {
  LedgerWatch* const watch = g_watch.load(std::memory_order_acquire);
  if (watched_ && watch != nullptr) watch->Refused(*this);
  return absl::ResourceExhaustedError(
      absl::StrCat("cannot allocate ", bytes, " bytes for ", what, ": ", why,
                   "; held now: ", Report().ToString()));
}

MemoryReport MemoryLedger::Report() const {
  MemoryReport report;
  for (int i = 0; i < kNumMemoryKinds; ++i) {
    report.by_kind[i] = {by_kind_[i].current.load(), by_kind_[i].peak.load()};
  }
  report.total = total();
  if (of_host()) report.kept_bytes = KeptBytes();
  return report;
}

MemoryUse MemoryLedger::total() const {
  return {total_.current.load(), total_.peak.load()};
}

void MemoryLedger::ResetPeak() {
  for (Counter& counter : by_kind_) counter.peak = counter.current.load();
  total_.peak = total_.current.load();
}

int64_t MemoryLedger::LeastMemoryLimit() const {
  int64_t least = kNoLimit;
  for (const MemoryLimit* limit : limits_) {
    least = std::min(least, limit->bytes());
  }
  return least;
}

int64_t MemoryLedger::least_memory_limit() const {
  absl::MutexLock lock(&limits_mutex_);
  return LeastMemoryLimit();
}

void MemoryLedger::FindLimit() {
  limit_bytes_ =
      unlimited_ > 0 ? kNoLimit : std::min(set_limit_, LeastMemoryLimit());
}

void MemoryLedger::SetLimit(int64_t bytes) {
  {
    absl::MutexLock lock(&limits_mutex_);
    set_limit_ = bytes;
    FindLimit();
  }
  if (of_host()) ReturnKept();  // kept buffers are not in the ledger
}

void MemoryLedger::ChangeLimits(const MemoryLimit* added,
                                const MemoryLimit* gone) {
  {
    absl::MutexLock lock(&limits_mutex_);
    if (added != nullptr) limits_.push_back(added);
    limits_.erase(std::remove(limits_.begin(), limits_.end(), gone),
                  limits_.end());
    FindLimit();
  }
  if (added != nullptr && of_host()) ReturnKept();
}

void MemoryLedger::ChangeUnlimited(int change) {
  absl::MutexLock lock(&limits_mutex_);
  unlimited_ += change;
  FindLimit();
}

// Returns "the limit is 1000", "the limit of cuda:0 is 1000 (who set it)".
std::string MemoryLedger::LimitText() const {
  absl::MutexLock lock(&limits_mutex_);
  const int64_t bytes = limit_bytes_;
  std::string text = absl::StrCat(
      "the limit ", device_ == "cpu" ? "" : absl::StrCat("of ", device_, " "),
      "is ", bytes);
  for (const MemoryLimit* limit : limits_) {
    if (limit->bytes() != bytes) continue;
    absl::StrAppend(&text, " (", limit->from(), ")");
    break;
  }
  return text;
}

MemoryLimit::MemoryLimit(MemoryLedger* ledger, int64_t bytes, std::string from)
    : ledger_(ledger), bytes_(bytes), from_(std::move(from)) {
  ledger_->ChangeLimits(/*added=*/this, /*gone=*/nullptr);
}

MemoryLimit::~MemoryLimit() {
  ledger_->ChangeLimits(/*added=*/nullptr, /*gone=*/this);
}

NoMemoryLimit::NoMemoryLimit(MemoryLedger* ledger) : ledger_(ledger) {
  ledger_->ChangeUnlimited(1);
}

NoMemoryLimit::~NoMemoryLimit() { ledger_->ChangeUnlimited(-1); }

}  // namespace tessera
