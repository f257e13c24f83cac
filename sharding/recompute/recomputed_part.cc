#include "sharding/recompute/recomputed_part.h"

#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/graph_task.h"

namespace tessera {

namespace autograd = torch::autograd;

void RecomputedPart::Add(const std::shared_ptr<Slot>& slot) {
  absl::MutexLock lock(&values_mutex_);
  slots_.push_back(slot);
}

std::shared_ptr<RecomputedPart::Slot> RecomputedPart::SlotOf(size_t number) {
  absl::MutexLock lock(&values_mutex_);
  return slots_[number].lock();
}

size_t RecomputedPart::num_slots() {
  absl::MutexLock lock(&values_mutex_);
  return slots_.size();
}

int64_t RecomputedPart::LastAlive() {
  absl::MutexLock lock(&values_mutex_);
  auto last = static_cast<int64_t>(slots_.size()) - 1;
  while (last >= 0 && slots_[static_cast<size_t>(last)].expired()) --last;
  return last;
}

void RecomputedPart::Fill(Slot* slot, at::Tensor tensor, int64_t task) {
  absl::MutexLock lock(&values_mutex_);
  slot->value_ = Value(std::move(tensor));
  slot->task_ = task;
}

bool RecomputedPart::IsFilled(Slot* slot, int64_t task) {
  absl::MutexLock lock(&values_mutex_);
  return slot->task_ == task && slot->value_.tensor.defined();
}

RecomputedPart::Value RecomputedPart::Take(Slot* slot, int64_t task) {
  absl::MutexLock lock(&values_mutex_);
  if (slot->task_ != task) return Value();
  return std::exchange(slot->value_, Value());
}

at::Tensor RecomputedPart::Unpack(Slot* slot) {
  const int64_t task = autograd::get_current_graph_task_id();
  Value value = task == -1 ? Value() : Take(slot, task);
  if (!value.tensor.defined()) {
    value = Compute(slot, task);
    bool ends_with = false;
    {
      absl::MutexLock lock(&values_mutex_);
      ends_with = std::exchange(ends_with_, task) == task;
    }
    if (task == -1) {
      EndTask(task);
    } else if (!ends_with) {
      autograd::Engine::get_default_engine().queue_callback(
          [part = weak_from_this(), task] {
            if (const auto alive = part.lock()) alive->EndTask(task);
          });
    }
  }
  TORCH_CHECK(!value.version.changed(), value.version.Error(value.tensor), " [",
              name_, "]");
  return std::move(value.tensor);
}

void RecomputedPart::Drop(std::optional<int64_t> task) {
  std::vector<at::Tensor> dropped;  // after the lock
  absl::MutexLock lock(&values_mutex_);
  for (const auto& weak : slots_) {
    const auto slot = weak.lock();
    if (slot == nullptr || slot->task_ != task.value_or(slot->task_)) continue;
    dropped.push_back(std::move(slot->value_.tensor));
    slot->value_ = Value();
  }
}

void RecomputedPart::EndTask(int64_t task) {
  TaskIsOver();
  Drop(task);
}

void ComputedParts::Add(std::weak_ptr<RecomputedPart> part) {
  absl::MutexLock lock(&mutex_);
  parts_.push_back(std::move(part));
}

void ComputedParts::DropValues() {
  std::vector<std::weak_ptr<RecomputedPart>> parts;
  {
    absl::MutexLock lock(&mutex_);
    parts.swap(parts_);
  }
  for (const auto& weak : parts) {
    if (const auto part = weak.lock()) part->DropValues();
  }
}

}  // namespace tessera
