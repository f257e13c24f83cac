#include "sharding/trace/trace_log.h"

#include <utility>

namespace tessera {

using Kind = TraceEvent::Kind;

void TraceLog::Add(TraceEvent event) {
  if (closed_) return;
  event.backward = backward_;
  event.unit = unit_;
  event.forward = forward_;
  record_.events.push_back(event);
}

int32_t TraceLog::Allocated(int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  const auto allocation = static_cast<int32_t>(record_.allocations.size());
  record_.allocations.emplace_back();
  Add({.kind = Kind::kAllocate, .what = allocation, .bytes = bytes});
  return allocation;
}

void TraceLog::Freed(int32_t allocation, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  Add({.kind = Kind::kFree, .what = allocation, .bytes = bytes});
}

void TraceLog::Used(int32_t allocation, bool values, bool written) {
  absl::MutexLock lock(&mutex_);
  if (closed_) return;
  TracedAllocation& used = record_.allocations[static_cast<size_t>(allocation)];
  const auto now = static_cast<int64_t>(record_.events.size());
  if (!backward_) {
    used.last_forward_use = now;
  } else if (used.first_backward_use < 0) {
    used.first_backward_use = now;
  }
  if (values) record_.uses.push_back({now, allocation, written});
}

void TraceLog::IsCast(int32_t allocation, int32_t of_parameter) {
  absl::MutexLock lock(&mutex_);
  if (closed_) return;
  record_.allocations[static_cast<size_t>(allocation)].cast_of = of_parameter;
}

void TraceLog::Operator(const std::string& name, int64_t temporary_bytes,
                        int64_t flops, int64_t moved_bytes) {
  absl::MutexLock lock(&mutex_);
  const auto [found, added] = operator_index_.try_emplace(
      name, static_cast<int32_t>(record_.operators.size()));
  if (added) record_.operators.push_back(name);
  Add({.what = found->second,
       .bytes = temporary_bytes,
       .flops = flops,
       .moved_bytes = moved_bytes});
}

void TraceLog::Begins(int32_t parameter) {
  absl::MutexLock lock(&mutex_);
  if (backward_) return;
  unit_ = parameter;
  Add({.kind = Kind::kBegin, .what = parameter});
}

void TraceLog::Touched(int32_t parameter) {
  absl::MutexLock lock(&mutex_);
  Add({.kind = Kind::kTouch, .what = parameter});
}

void TraceLog::Gradient(int32_t parameter, int32_t allocation) {
  absl::MutexLock lock(&mutex_);
  Add({.kind = Kind::kGradient, .what = parameter, .other = allocation});
}

void TraceLog::BeginBackward() {
  absl::MutexLock lock(&mutex_);
  backward_ = true;
}

void TraceLog::SetUnit(int32_t unit, int64_t forward) {
  absl::MutexLock lock(&mutex_);
  unit_ = unit;
  forward_ = forward;
}

int64_t TraceLog::num_events() const {
  absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(record_.events.size());
}

int32_t TraceLog::unit() const {
  absl::MutexLock lock(&mutex_);
  return unit_;
}

bool TraceLog::backward() const {
  absl::MutexLock lock(&mutex_);
  return backward_;
}

TraceLog::Record TraceLog::Close() {
  absl::MutexLock lock(&mutex_);
  closed_ = true;
  return std::move(record_);
}

}  // namespace tessera
