// Why what is saved is held until the region ends: only then is it known that
// every operator on the way to it can be run again. A forward's peak is that of
// one region more, which its backward needs anyway.
//
// Why what is given up is restored all at once: the nodes of a region's
// operators run one after the other, and each wants what others made. What is
// unpacked is autograd's alone then, and freed with its node.
#include "sharding/recompute/region.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/torch/saved_version.h"
#include "base/torch/storage_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"

namespace tessera {
namespace {

// To the bit, in whatever memory.
bool SameBits(const at::Tensor& a, const at::Tensor& b) {
  if (a.has_storage() && IsHidden(a.storage().unsafeGetStorageImpl())) {
    return true;  // another stage's
  }
  TorchScope scope;
  const at::Tensor x = a.contiguous().cpu(), y = b.contiguous().cpu();
  return x.nbytes() == 0 ||  // then they may lie nowhere
         std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

std::string TypeOf(const TensorPlace& place, at::Device device) {
  TorchScope scope;
  return at::empty({0}, at::TensorOptions(place.dtype).device(device))
      .toString();
}

}  // namespace

class Region::Saved final : public Slot {
 public:
  Saved(std::shared_ptr<RecomputedPart> region, absl::Mutex* mutex,
        const at::Tensor& tensor, at::Tensor alias)
      : Slot(std::move(region)),
        mutex_(mutex),
        version_(tensor),
        place_(tensor),
        device_(tensor.device()),
        alias_(std::move(alias)) {}

  at::Tensor Unpack() override {
    TORCH_CHECK(!version_.changed(),
                version_.Error(TypeOf(place_, device_), place_.sizes));
    {
      absl::MutexLock lock(mutex_);
      if (alias_.defined()) return alias_;
    }
    return Slot::Unpack();
  }

 private:
  friend class Region;
  absl::Mutex* const mutex_;     // the region's
  std::shared_ptr<void> token_;  // of what is kept
  const SavedVersion version_;
  const TensorPlace place_;
  const at::Device device_;
  at::Tensor alias_;                // undefined: given up, or
  ActivationStore::Stored stored_;  // there
};

Region::Region(const std::string& name, Options options,
               OutsideTensors* outside)
    : RecomputedPart(name),
      tape_(name),
      options_(std::move(options)),
      outside_(outside) {}
Region::~Region() = default;

bool Region::Begin(const c10::OperatorHandle& op, const OperatorInfo& info,
                   const torch::jit::Stack& stack) {
  return options_.records && tape_.Begin(op, info, stack, outside_);
}

void Region::End(const c10::OperatorHandle& op, const OperatorInfo& info,
                 const torch::jit::Stack& stack) {
  tape_.End(op, info, stack,
            options_.keeps != nullptr && options_.keeps(info.name));
}

std::shared_ptr<SavedSlot> Region::Save(const at::Tensor& tensor,
                                        const at::Tensor& alias) {
  saved_ = true;
  if (!FollowsAll()) Spoil("the thread's state was set back in its forward");
  const bool plain = IsPlain(tensor) && !tensor.is_inference();
  if (!tape_.spoilt().empty() || !plain) return nullptr;
  auto slot =
      std::make_shared<Saved>(shared_from_this(), &mutex_, tensor, alias);
  Add(slot);
  saved_slots_.push_back(slot);
  return slot;
}

int64_t Region::Prepare(absl::Span<const int> other) {
  if (!tape_.spoilt().empty()) return 0;
  std::vector<int> wanted;
  std::vector<std::shared_ptr<Saved>> slots;
  for (const auto& weak : saved_slots_) {
    auto slot = weak.lock();
    if (slot == nullptr) continue;
    const int memory = tape_.MemoryOf(slot->alias_);
    // What no operator has filled is not the tape's to make.
    if (memory < 0 || tape_.IsUnfilled(memory)) {
      held_.push_back(weak);
      continue;
    }
    if (std::find(other.begin(), other.end(), memory) != other.end()) {
      tape_.Hold(memory, slot->alias_);
    }
    wanted.push_back(memory);
    slots.push_back(std::move(slot));
  }
  saved_slots_.clear();
  tape_.Close(wanted, outside_);
  int64_t bytes = 0;
  absl::flat_hash_set<int> counted;
  for (size_t i = 0; i < slots.size(); ++i) {
    given_up_.emplace_back();  // as many as the tape restores
    if (tape_.Holds(wanted[i])) {
      held_.push_back(slots[i]);
      continue;
    }
    given_up_.back() = slots[i];
    if (counted.insert(wanted[i]).second) {
      bytes += static_cast<int64_t>(slots[i]->alias_.storage().nbytes());
    }
  }
  return bytes;
}

// What was saved in the memory and is not what was `made` for it; null:
// nothing.
const Region::Saved* Region::FindOther(int memory,
                                       const c10::Storage& made) const {
  for (size_t i = 0; i < given_up_.size(); ++i) {
    if (tape_.wanted(i) != memory) continue;
    const auto slot = given_up_[i].lock();
    if (slot == nullptr || slot->version_.changed()) continue;
    if (!SameBits(slot->alias_, slot->place_.Over(made))) return slot.get();
  }
  return nullptr;
}

// What differs is replaced by what forward made, so that what is computed from
// it does not differ for that reason.
absl::StatusOr<std::vector<int>> Region::Verify() {
  std::vector<int> other;
  absl::flat_hash_set<int> seen;
  absl::Status same;
  TESSERA_RETURN_IF_ERROR(CatchTorch(tape_.name(), [&] {
    const auto compare = [&](int memory, c10::Storage* made) {
      seen.insert(memory);
      const Saved* const saved = FindOther(memory, *made);
      if (saved == nullptr) return;
      *made = saved->alias_.storage();
      if (!saved->alias_.is_floating_point() && !saved->alias_.is_complex()) {
        other.push_back(memory);
        return;
      }
      for (const int each : tape_.MadeWith(memory)) other.push_back(each);
    };
    const std::vector<c10::Storage> restored = tape_.Replay(compare);
    for (size_t i = 0; i < given_up_.size() && same.ok(); ++i) {
      const int memory = tape_.wanted(i);
      if (!seen.insert(memory).second) continue;
      if (FindOther(memory, restored[i]) == nullptr) continue;
      same = absl::DataLossError(
          absl::StrCat("the result of ", tape_.MakerOf(memory),
                       " has other bits when it is recomputed"));
    }
  }));
  TESSERA_RETURN_IF_ERROR(same);
  return other;
}

int64_t Region::Hold(absl::Span<const int> other, std::string* told) {
  const absl::flat_hash_set<int> memories(other.begin(), other.end());
  absl::btree_map<std::string, int64_t> bytes_of;
  absl::flat_hash_set<int> counted;
  int64_t bytes = 0;
  std::vector<int> wanted;
  for (size_t i = 0; i < given_up_.size(); ++i) {
    wanted.push_back(tape_.wanted(i));
    const auto slot = given_up_[i].lock();
    if (slot == nullptr || !memories.contains(wanted.back())) continue;
    held_.push_back(std::exchange(given_up_[i], {}));
    if (!counted.insert(wanted.back()).second) continue;
    tape_.Hold(wanted.back(), slot->alias_);
    const auto size = static_cast<int64_t>(slot->alias_.storage().nbytes());
    bytes_of[tape_.MakerOf(wanted.back())] += size;
    bytes += size;
  }
  tape_.Close(wanted, outside_);
  *told =
      absl::StrJoin(bytes_of, ", ", [](std::string* text, const auto& each) {
        absl::StrAppend(text, each.first, " (", each.second, " bytes)");
      });
  return bytes;
}

void Region::GiveUp() {
  absl::MutexLock lock(&mutex_);
  for (const auto& weak : given_up_) {
    if (const auto slot = weak.lock()) slot->alias_.reset();
  }
}

void Region::Move(Saved* slot, ActivationStore::Group* group) {
  if (!slot->alias_.defined() || slot->version_.changed()) return;
  const at::Tensor& t = slot->alias_;
  auto stored = group->Put(t.storage(), static_cast<int64_t>(t.nbytes()),
                           slot->version_.saved(),
                           absl::StrCat("activations of ", tape_.name()));
  ThrowIfError(stored.status());
  slot->stored_ = *std::move(stored);
  if (slot->stored_ != nullptr) slot->alias_.reset();
}

void Region::MoveHeld() {
  absl::MutexLock lock(&mutex_);
  ActivationStore::Group group = options_.store->NewGroup();
  for (const auto& weak : held_) {
    if (const auto slot = weak.lock()) Move(slot.get(), &group);
  }
  tape_.MoveHeld(&group);
}

int64_t Region::SavedBytes() const {
  int64_t bytes = 0;
  absl::flat_hash_set<const void*> counted;
  for (const auto& weak : saved_slots_) {
    const auto slot = weak.lock();
    if (slot == nullptr) continue;
    const c10::Storage& storage = slot->alias_.storage();
    if (!counted.insert(storage.unsafeGetStorageImpl()).second) continue;
    bytes += static_cast<int64_t>(storage.nbytes());
  }
  return bytes;
}

void Region::MoveSaved() {
  absl::MutexLock lock(&mutex_);
  ActivationStore::Group group = options_.store->NewGroup();
  held_.swap(saved_slots_);
  for (const auto& weak : held_) {
    if (const auto slot = weak.lock()) Move(slot.get(), &group);
  }
}

void Region::KeepAll(const std::shared_ptr<void>& token) {
  for (const auto& weak : given_up_) {
    if (const auto slot = weak.lock()) slot->token_ = token;
  }
  given_up_.clear();
  held_.clear();
  saved_slots_.clear();
  tape_.Clear();
}

RecomputedPart::Value Region::Compute(Slot* slot, int64_t task) {
  absl::MutexLock lock(&mutex_);
  // Another thread of the task may have computed it meanwhile.
  Value value = Take(slot, task);
  if (value.tensor.defined()) return value;
  auto* const saved = static_cast<Saved*>(slot);
  saved->stored_ == nullptr ? Restore(task) : Fetch(saved, task);
  return Take(slot, task);
}

// Once for all that have saved it: autograd asks for them one by one.
void Region::Fetch(Saved* saved, int64_t task) {
  auto memory = options_.store->Get(saved->stored_);
  ThrowIfError(memory.status());
  for (const auto& weak : held_) {
    const auto other = weak.lock();
    if (other != nullptr && other->stored_ == saved->stored_) {
      Fill(other.get(), other->place_.Over(*memory), task);
    }
  }
}

// What is moved is read once for the tape and for autograd.
void Region::Restore(int64_t task) {
  if (options_.computed != nullptr) options_.computed->Add(weak_from_this());
  for (const auto& weak : held_) {
    const auto slot = weak.lock();
    if (slot == nullptr || slot->stored_ == nullptr) continue;
    if (!IsFilled(slot.get(), task)) Fetch(slot.get(), task);
  }
  const std::vector<c10::Storage> restored = tape_.Replay();
  for (size_t i = 0; i < given_up_.size(); ++i) {
    const auto slot = given_up_[i].lock();
    if (slot == nullptr) continue;
    Fill(slot.get(), slot->place_.Over(restored[i]), task);
  }
}

}  // namespace tessera
