// Why eviction follows from the order of operators alone: to bring a tensor
// back is an all-gather, so all ranks have to evict and bring back the same
// ones at the same operators. What allocators hold, or time, or the number of
// threads differs between ranks; any of them in the choice would let ranks wait
// for each other in gathers of different tensors.
//
// Why every eviction takes a fingerprint: from then on a rank has a slice only,
// and the whole is made of all ranks' slices. Ranks that were seeded
// differently would get a mixture of their values, which is a model that nobody
// initialised. The fingerprint of the whole tensor shows it at the first
// gather, or in Finish.
//
// Why an overwritten tensor keeps its shard until the operator is done: if that
// throws the values of before are still the values.
#include "sharding/construct/construction.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/check.h"
#include "base/layout/flat_buffer.h"
#include "base/status.h"
#include "base/torch/storage_access.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "comm/all_gather_values.h"
#include "sharding/partition/module_walk.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

thread_local Construction* t_current = nullptr;

std::string Describe(const at::Tensor& t) {
  std::ostringstream out;
  out << t.scalar_type() << " " << t.sizes();
  return out.str();
}

std::string AwayError(const std::string& what, bool is_parameter) {
  return absl::StrCat(
      "[ConstructSharded] ",
      is_parameter
          ? absl::StrCat("parameter '", what,
                         "' is sharded until Engine::Create takes it over")
          : absl::StrCat("a tensor (", what, ") is sharded between uses"),
      ", and its memory was asked for outside of an operator (an accessor, a "
      "raw data pointer). Hold `auto pin = tessera::Use(t);` as long as the "
      "pointer is used.");
}

at::Tensor BytesAt(char* data, int64_t bytes) {
  return TensorOver(data, {bytes}, {1}, at::kByte, at::kCPU);
}

}  // namespace

Construction::Scope::Scope(Construction* construction)
    : seen_(c10::DispatchKeySet(kTagKey)), memory_(construction) {
  TESSERA_CHECK(t_current == nullptr) << "constructions are not nested";
  t_current = construction;
}

Construction::Scope::~Scope() { t_current = nullptr; }

Construction* Construction::Current() { return t_current; }

Construction::Counts Construction::counts() const {
  absl::MutexLock lock(&mutex_);
  return counts_;
}

int64_t Construction::SliceBytes(int64_t bytes) const {
  constexpr int64_t kAlignBytes = 64;
  const int64_t step = comm_->world_size() * kAlignBytes;
  return (bytes + step - 1) / step * kAlignBytes;
}

c10::DataPtr Construction::Allocate(int64_t bytes, c10::Allocator& base) {
  if (bytes < kEvictableFromBytes) return base.allocate(bytes);
  auto memory = Evictable::Allocate(
      bytes, SliceBytes(bytes) * comm_->world_size(), shared_from_this());
  ThrowIfError(memory.status());
  return *std::move(memory);
}

std::shared_ptr<Construction> Construction::OwnerOf(const Evictable& memory) {
  // No other class owns any.
  return std::static_pointer_cast<Construction>(memory.owner());
}

void Construction::Forget(Evictable* memory) {
  absl::MutexLock lock(&mutex_);
  const auto found = nodes_.find(memory);
  if (found == nodes_.end()) return;
  if (memory->whole()) whole_bytes_ -= memory->bytes();
  by_use_.erase({found->second.used, found->second.number});
  nodes_.erase(found);
}

void Construction::Use(Evictable* memory, Node* node) {
  by_use_.erase({node->used, node->number});
  node->used = now_;
  by_use_[{node->used, node->number}] = memory;
}

void Construction::Note(const at::Tensor& result) {
  if (!result.defined() || !result.has_storage()) return;
  c10::StorageImpl* const storage = result.storage().unsafeGetStorageImpl();
  Evictable* const memory = Evictable::Of(storage);
  if (memory == nullptr || memory->owner().get() != this) return;
  absl::MutexLock lock(&mutex_);
  auto found = nodes_.find(memory);
  if (found == nodes_.end()) {
    Node node{c10::weak_intrusive_ptr<c10::StorageImpl>(
                  Storage::reclaim_copy(storage)),
              next_number_++, now_, Describe(result)};
    found = nodes_.emplace(memory, std::move(node)).first;
    whole_bytes_ += memory->bytes();
  }
  Use(memory, &found->second);
  if (!HasTag(result)) AddTag(result);
}

absl::Status Construction::Trim() {
  std::vector<Storage> alive;  // not to be destroyed under the lock
  absl::MutexLock lock(&mutex_);
  auto next = by_use_.begin();
  while (whole_bytes_ > budget_ / 2 && next != by_use_.end() &&
         next->first.first < now_) {
    Evictable* const memory = next->second;
    ++next;  // the one before may go
    const Node& node = nodes_.at(memory);
    if (node.pins > 0) continue;
    alive.push_back(node.storage.lock());
    if (alive.back() == nullptr) continue;
    TESSERA_RETURN_IF_ERROR(Evict(memory, alive.back()));
  }
  ++now_;
  return absl::OkStatus();
}

absl::Status Construction::Evict(Evictable* memory, const Storage& storage) {
  Node& node = nodes_.at(memory);
  const int64_t slice = SliceBytes(memory->bytes());
  TESSERA_ASSIGN_OR_RETURN(
      node.shard, AllocateCounted(slice, MemoryKind::kParameters, true));
  const int64_t begin = std::min(comm_->rank() * slice, memory->bytes());
  const int64_t end = std::min(begin + slice, memory->bytes());
  std::memcpy(node.shard.data(), memory->data() + begin,
              static_cast<size_t>(end - begin));
  node.print = Fingerprint(memory->data(), memory->bytes());
  if (!finished_) history_.emplace_back(node.print, node.what);
  const absl::Status taken =
      memory->Take(storage.get(), AwayError(node.what, node.is_parameter));
  by_use_.erase({node.used, node.number});
  whole_bytes_ -= memory->bytes();
  ++counts_.evictions;
  return taken;
}

absl::Status Construction::Restore(Evictable* memory, const Storage& storage,
                                   bool overwritten) {
  TorchScope scope;
  Node& node = nodes_.at(memory);
  absl::Status status = memory->Return();
  if (!status.ok()) {
    if (!overwritten) comm_->Announce(status);  // the others gather
    return status;
  }
  if (overwritten) {
    ++counts_.overwrites;
  } else {
    ++counts_.gathers;
    const int64_t slice = node.shard.bytes();
    status =
        comm_
            ->AllGather(
                BytesAt(node.shard.data_as<char>(), slice),
                BytesAt(memory->data(), slice * comm_->world_size()),
                CommTag{absl::StrCat("construction: gather of ", node.what)})
            .Wait();
    if (status.ok() &&
        Fingerprint(memory->data(), memory->bytes()) != node.print) {
      status = absl::InvalidArgumentError(absl::StrCat(
          "ConstructSharded: the ranks construct different values, first seen "
          "in ",
          node.what,
          ", of which each keeps a part; give all ranks the same seed before, "
          "and let "
          "nothing that is written there depend on the rank"));
      comm_->Announce(status);  // on some ranks it may be as it was
    }
  }
  if (!status.ok()) {
    status.Update(
        memory->Take(storage.get(), AwayError(node.what, node.is_parameter)));
    return status;
  }
  memory->Show(storage.get());
  node.overwritten = overwritten;
  if (!overwritten) node.shard.Free();
  whole_bytes_ += memory->bytes();
  return absl::OkStatus();
}

absl::Status Construction::Pin(const Storage& storage, bool overwritten) {
  Evictable* const memory = Evictable::Of(storage.get());
  absl::MutexLock lock(&mutex_);
  const auto found = nodes_.find(memory);
  if (found == nodes_.end()) return absl::OkStatus();  // not to be evicted
  if (!memory->whole()) {
    TESSERA_RETURN_IF_ERROR(Restore(memory, storage, overwritten));
  }
  Use(memory, &found->second);
  ++found->second.pins;
  return absl::OkStatus();
}

void Construction::Unpin(const Storage& storage, bool done) {
  absl::MutexLock lock(&mutex_);
  // The operator may have given it other memory.
  const auto found = nodes_.find(Evictable::Of(storage.get()));
  if (found == nodes_.end()) return;
  Node& node = found->second;
  Evictable* const memory = found->first;
  if (node.pins > 0) --node.pins;
  if (node.overwritten && !done && node.pins == 0) {
    // Nothing was written: the values are those of the shard.
    node.overwritten = false;
    // An error is on its way already: the operator's.
    (void)memory->Take(storage.get(), AwayError(node.what, node.is_parameter));
    by_use_.erase({node.used, node.number});
    whole_bytes_ -= memory->bytes();
    return;
  }
  if (node.overwritten && done) {
    node.overwritten = false;
    node.shard.Free();
  }
  if (memory->whole()) Use(memory, &node);
}

// In order of appearance.
std::vector<Construction::Storage> Construction::All() {
  std::vector<std::pair<int64_t, Storage>> found;
  absl::MutexLock lock(&mutex_);
  for (const auto& [memory, node] : nodes_) {
    Storage storage = node.storage.lock();
    if (storage != nullptr) found.emplace_back(node.number, std::move(storage));
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Storage> all;
  for (auto& each : found) all.push_back(std::move(each.second));
  return all;
}

absl::Status Construction::CheckSameOnAllRanks() {
  std::vector<std::pair<uint64_t, std::string>> mine;
  {
    absl::MutexLock lock(&mutex_);
    mine.swap(history_);
  }
  std::vector<uint64_t> prints;
  for (const auto& [print, what] : mine) prints.push_back(print);
  TESSERA_ASSIGN_OR_RETURN(
      const auto all, AllGatherLists(comm_.get(), prints,
                                     CommTag{"comparison of constructions"}));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    const auto at =
        static_cast<size_t>(std::mismatch(all[0].begin(), all[0].end(),
                                          all[rank].begin(), all[rank].end())
                                .first -
                            all[0].begin());
    return absl::InvalidArgumentError(absl::StrCat(
        "ConstructSharded: ranks 0 and ", rank,
        " construct different values, first in ",
        at < mine.size() ? mine[at].second : "what one of them has more of",
        "; give all ranks the same seed before, and let the constructor not "
        "depend on "
        "the rank"));
  }
  return absl::OkStatus();
}

absl::Status Construction::ShardParameters(const torch::nn::Module& module) {
  absl::flat_hash_map<const c10::StorageImpl*, std::string> names;
  for (const auto& p : WalkModule(module).parameters) {
    if (!p.tensor.has_storage()) continue;
    names.try_emplace(p.tensor.storage().unsafeGetStorageImpl(), p.name);
  }
  for (const Storage& storage : All()) {
    Evictable* const memory = Evictable::Of(storage.get());
    const auto name = names.find(storage.get());
    if (memory == nullptr || name == names.end()) continue;
    absl::MutexLock lock(&mutex_);
    Node& node = nodes_.at(memory);
    node.what = name->second;
    node.is_parameter = true;
    if (memory->whole()) {
      TESSERA_RETURN_IF_ERROR(Evict(memory, storage));
    } else {
      memory->SetError(storage.get(), AwayError(node.what, true));
    }
  }
  absl::MutexLock lock(&mutex_);
  finished_ = true;
  return absl::OkStatus();
}

absl::Status Construction::GiveBack(const Storage& storage) {
  Evictable* const memory = Evictable::Of(storage.get());
  const auto self = OwnerOf(*memory);  // which may go with it
  absl::MutexLock lock(&mutex_);
  const auto found = nodes_.find(memory);
  if (found == nodes_.end()) return absl::OkStatus();  // was never seen
  const Node& node = found->second;
  if (!memory->whole()) {
    TESSERA_RETURN_IF_ERROR(Restore(memory, storage, /*overwritten=*/false));
  }
  whole_bytes_ -= memory->bytes();
  by_use_.erase({node.used, node.number});
  nodes_.erase(found);
  memory->Retire();
  return absl::OkStatus();
}

absl::Status Construction::Finish(const torch::nn::Module& module) {
  TESSERA_RETURN_IF_ERROR(ShardParameters(module));
  TESSERA_RETURN_IF_ERROR(CheckSameOnAllRanks());
  for (const Storage& storage : All()) {
    Evictable* const memory = Evictable::Of(storage.get());
    if (memory == nullptr) continue;
    {
      absl::MutexLock lock(&mutex_);
      if (nodes_.at(memory).is_parameter) continue;
    }
    TESSERA_RETURN_IF_ERROR(GiveBack(storage));
  }
  for (const auto& buffer : module.named_buffers()) {
    // One that is a view of a parameter is sharded with it.
    if (buffer.value().defined() && !IsEvictable(buffer.value())) {
      RemoveTag(buffer.value());
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
