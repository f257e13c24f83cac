#include "engine/access/state_table.h"

#include <torch/torch.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr const char* kStateNames[] = {"value", "exp_avg", "exp_avg_sq"};
constexpr size_t kMaxNamed = 8;  // in a message

using Parameter = FlatParameter::Parameter;

// Numbers of a storage for each element of a tensor.
int64_t NumbersPer(const at::Tensor& tensor) {
  return tensor.is_complex() ? 2 : 1;
}

at::ScalarType NumberDtype(const at::Tensor& tensor) {
  return tensor.is_complex() ? c10::toRealValueType(tensor.scalar_type())
                             : tensor.scalar_type();
}

// Strides that count; those of dims of one element, or of tensors of none, may
// be anything.
std::vector<int64_t> PlainStrides(at::IntArrayRef sizes,
                                  at::IntArrayRef strides) {
  std::vector<int64_t> plain(strides.begin(), strides.end());
  bool empty = false;
  for (int64_t size : sizes) empty |= size == 0;
  for (size_t d = 0; d < plain.size(); ++d) {
    if (empty || sizes[d] == 1) plain[d] = 0;
  }
  return plain;
}

void AddTensor(const std::string& name, const at::Tensor& tensor,
               int64_t offset, at::IntArrayRef strides,
               proto::CheckpointStorage* storage) {
  proto::CheckpointTensor* const added = storage->add_tensors();
  added->set_name(name);
  added->set_offset(offset);
  for (int64_t size : tensor.sizes()) added->add_sizes(size);
  for (int64_t stride : strides) added->add_strides(stride);
  if (tensor.is_complex()) added->set_complex(true);
}

void AddState(const char* name, at::ScalarType dtype,
              proto::CheckpointStorage* storage) {
  proto::CheckpointState* const state = storage->add_states();
  state->set_name(name);
  state->set_dtype(CheckpointDtype(dtype));
}

std::vector<int64_t> ContiguousStrides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

}  // namespace

StateTable::StateTable(const std::vector<std::shared_ptr<FlatParameter>>& flats,
                       AdamW* optimizer, const torch::nn::Module& module)
    : flats_(flats), optimizer_(optimizer) {
  const auto named = module.named_parameters();
  const auto buffers = module.named_buffers();
  for (const auto& list : {named, buffers}) {
    for (const auto& item : list) {
      names_[item.value().unsafeGetTensorImpl()].push_back(item.key());
    }
  }
  absl::flat_hash_set<const at::TensorImpl*> seen;
  std::vector<std::tuple<int, int, int>> places;  // index, flat, slot
  for (size_t f = 0; f < flats_.size(); ++f) {
    for (const Parameter& p : flats_[f]->parameters()) {
      seen.insert(p.tensor.unsafeGetTensorImpl());
      // Of one that the module has let go of since.
      std::vector<std::string>& names = names_[p.tensor.unsafeGetTensorImpl()];
      if (names.empty()) names.push_back(p.name);
    }
    for (int s = 0; s < flats_[f]->layout().num_slots(); ++s) {
      places.emplace_back(flats_[f]->ParameterOfSlot(s).index,
                          static_cast<int>(f), s);
    }
  }
  std::sort(places.begin(), places.end());
  for (const auto& [index, flat, slot] : places) slots_.push_back({flat, slot});
  for (const auto& item : named) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) {
      plain_.push_back({item.value(), /*buffer=*/false});
    }
  }
  for (const auto& item : buffers) {
    if (item.value().defined() &&
        seen.insert(item.value().unsafeGetTensorImpl()).second) {
      plain_.push_back({item.value(), /*buffer=*/true});
    }
  }
}

const std::vector<std::string>& StateTable::NamesOf(
    const at::Tensor& tensor) const {
  return names_.at(tensor.unsafeGetTensorImpl());
}

at::Tensor StateTable::Elements(int flat, State state) const {
  if (state == kValue) return flats_[static_cast<size_t>(flat)]->masters();
  if (optimizer_ == nullptr || !optimizer_->exp_avg(flat).defined()) return {};
  return state == kExpAvg ? optimizer_->exp_avg(flat).View()
                          : optimizer_->exp_avg_sq(flat).View();
}

Range StateTable::Part(const Slot& slot, Range part) const {
  return Intersect(
      flats_[static_cast<size_t>(slot.flat)]->layout().slot(slot.slot), part);
}

void StateTable::DescribeSlot(const Slot& slot,
                              proto::CheckpointStorage* storage) const {
  const FlatParameter& flat = *flats_[static_cast<size_t>(slot.flat)];
  const Range range = flat.layout().slot(slot.slot);
  storage->set_numel(range.numel());
  for (const Parameter& p : flat.parameters()) {
    if (p.slot != slot.slot) continue;
    for (const std::string& name : NamesOf(p.tensor)) {
      AddTensor(name, p.tensor,
                (p.range.begin - range.begin) / NumbersPer(p.tensor),
                p.tensor.strides(), storage);
      if (optimizer_ != nullptr) {
        storage->mutable_tensors(storage->tensors_size() - 1)
            ->set_steps(
                optimizer_->parameter_steps()[static_cast<size_t>(p.index)]);
      }
    }
  }
  for (State state : {kValue, kExpAvg, kExpAvgSq}) {
    const at::Tensor elements = Elements(slot.flat, state);
    if (elements.defined()) {
      AddState(kStateNames[state], elements.scalar_type(), storage);
    }
  }
}

void StateTable::Describe(proto::CheckpointManifest* head) const {
  for (const Slot& slot : slots_) DescribeSlot(slot, head->add_storages());
  for (const Plain& plain : plain_) {
    proto::CheckpointStorage* const storage = head->add_storages();
    storage->set_numel(plain.tensor.numel() * NumbersPer(plain.tensor));
    storage->set_buffer(plain.buffer);
    for (const std::string& name : NamesOf(plain.tensor)) {
      AddTensor(name, plain.tensor, 0, ContiguousStrides(plain.tensor.sizes()),
                storage);
    }
    AddState(kStateNames[kValue], NumberDtype(plain.tensor), storage);
  }
}

namespace {

// Finds a model's tensors in a manifest, and collects what does not fit.
class Matcher {
 public:
  Matcher(const StateTable& table, const proto::CheckpointManifest& manifest)
      : table_(table), manifest_(manifest) {
    for (int s = 0; s < manifest.storages_size(); ++s) {
      for (const auto& tensor : manifest.storages(s).tensors()) {
        saved_[tensor.name()] = {s, &tensor};
      }
    }
  }

  // The place of a storage of `numel` numbers that holds `tensors`, each from
  // a number of it on.
  StateMatch::Place Match(
      int64_t numel, absl::Span<const std::pair<at::Tensor, int64_t>> tensors,
      bool contiguous) {
    std::optional<StateMatch::Place> place;
    for (const auto& [tensor, at] : tensors) {
      const Saved* const saved = Find(tensor);
      if (saved == nullptr) continue;
      CheckSizes(tensor, *saved->tensor, contiguous);
      const int64_t shift = saved->tensor->offset() * NumbersPer(tensor) - at;
      if (place.has_value() &&
          (place->storage != saved->storage || place->shift != shift)) {
        wrong_.push_back(absl::StrCat(
            "'", saved->tensor->name(),
            "' shares memory with another parameter, otherwise than there"));
      }
      if (!place.has_value()) {
        place.emplace();
        place->storage = saved->storage;
        place->shift = shift;
      }
    }
    if (!place.has_value()) return {};
    const proto::CheckpointStorage& storage =
        manifest_.storages(place->storage);
    if (place->shift < 0 || place->shift + numel > storage.numel()) {
      wrong_.push_back(absl::StrCat("'", storage.tensors(0).name(),
                                    "': ", storage.numel(),
                                    " numbers, expected ", numel));
    }
    for (int i = 0; i < storage.states_size(); ++i) {
      for (int known = 0; known < StateTable::kNumStates; ++known) {
        if (storage.states(i).name() == kStateNames[known]) {
          place->states[known] = i;
        }
      }
    }
    const int value = place->states[StateTable::kValue];
    if (value < 0) {
      wrong_.push_back(
          absl::StrCat("'", storage.tensors(0).name(), "' has no values"));
      return *place;
    }
    // Numbers with a point are cast to each other, as LoadSafetensors does.
    const std::string& saved = storage.states(value).dtype();
    const at::ScalarType dtype = NumberDtype(tensors[0].first);
    if (saved != CheckpointDtype(dtype) &&
        !(at::isFloatingType(dtype) &&
          at::isFloatingType(DtypeOfCheckpoint(saved)))) {
      wrong_.push_back(absl::StrCat("'", storage.tensors(0).name(), "' is of ",
                                    saved, " there, of ", c10::toString(dtype),
                                    " here"));
    }
    return *place;
  }

  absl::Status Result() {
    std::vector<std::string> unexpected;
    for (const auto& storage : manifest_.storages()) {
      for (const auto& tensor : storage.tensors()) {
        if (!IsFound(storage, tensor)) unexpected.push_back(tensor.name());
      }
    }
    std::vector<std::string> faults;
    if (!missing_.empty()) {
      faults.push_back(absl::StrCat("lacks ", Some(missing_)));
    }
    if (!unexpected.empty()) {
      faults.push_back(
          absl::StrCat("holds ", Some(unexpected), ", which the module lacks"));
    }
    if (!wrong_.empty()) faults.push_back(Some(wrong_, ""));
    if (faults.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("the checkpoint is of another model: it ",
                     absl::StrJoin(faults, "; ")));
  }

 private:
  struct Saved {
    int storage = 0;
    const proto::CheckpointTensor* tensor = nullptr;
  };

  static bool SameView(const proto::CheckpointTensor& a,
                       const proto::CheckpointTensor& b) {
    return a.offset() == b.offset() && a.complex() == b.complex() &&
           std::equal(a.sizes().begin(), a.sizes().end(), b.sizes().begin(),
                      b.sizes().end()) &&
           std::equal(a.strides().begin(), a.strides().end(),
                      b.strides().begin(), b.strides().end());
  }

  // The module has it, or what is the same under another name.
  bool IsFound(const proto::CheckpointStorage& storage,
               const proto::CheckpointTensor& tensor) const {
    for (const auto& other : storage.tensors()) {
      if (found_.contains(other.name()) && SameView(other, tensor)) return true;
    }
    return false;
  }

  // By any of its names; tied ones may have been named by another.
  const Saved* Find(const at::Tensor& tensor) {
    const std::vector<std::string>& names = table_.NamesOf(tensor);
    const Saved* found = nullptr;
    for (const std::string& name : names) {
      const auto it = saved_.find(name);
      if (it == saved_.end()) continue;
      found_.insert(name);
      if (found == nullptr) {
        found = &it->second;
      } else if (it->second.storage != found->storage ||
                 !SameView(*it->second.tensor, *found->tensor)) {
        wrong_.push_back(absl::StrCat("'", name, "' and '",
                                      found->tensor->name(),
                                      "' are one here, and two there"));
      }
    }
    if (found == nullptr) missing_.push_back(names[0]);
    return found;
  }

  void CheckSizes(const at::Tensor& tensor,
                  const proto::CheckpointTensor& saved, bool contiguous) {
    const std::vector<int64_t> sizes(saved.sizes().begin(),
                                     saved.sizes().end());
    const std::vector<int64_t> strides(saved.strides().begin(),
                                       saved.strides().end());
    const auto shape = [](at::IntArrayRef of) {
      return absl::StrCat("[", absl::StrJoin(of, ", "), "]");
    };
    if (tensor.sizes() != at::IntArrayRef(sizes) ||
        tensor.is_complex() != saved.complex()) {
      wrong_.push_back(absl::StrCat(
          "'", saved.name(), "' is ", saved.complex() ? "complex " : "",
          shape(sizes), " there, ", tensor.is_complex() ? "complex " : "",
          shape(tensor.sizes()), " here"));
      return;
    }
    const std::vector<int64_t> own =
        contiguous ? ContiguousStrides(tensor.sizes()) : tensor.strides().vec();
    if (PlainStrides(sizes, own) != PlainStrides(sizes, strides)) {
      wrong_.push_back(absl::StrCat("'", saved.name(), "' has strides ",
                                    shape(strides), " there, ", shape(own),
                                    " here (another memory format)"));
    }
  }

  static std::string Some(const std::vector<std::string>& all,
                          const char* quote = "'") {
    const size_t n = std::min(all.size(), kMaxNamed);
    std::string text =
        absl::StrCat(quote,
                     absl::StrJoin(all.begin(), all.begin() + n,
                                   absl::StrCat(quote, ", ", quote)),
                     quote);
    if (n < all.size())
      absl::StrAppend(&text, " and ", all.size() - n, " more");
    return text;
  }

  const StateTable& table_;
  const proto::CheckpointManifest& manifest_;
  absl::flat_hash_map<std::string, Saved> saved_;
  absl::flat_hash_set<std::string> found_;
  std::vector<std::string> missing_, wrong_;
};

}  // namespace

absl::StatusOr<StateMatch> StateMatch::Create(
    const StateTable& table,
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const proto::CheckpointManifest& manifest) {
  Matcher matcher(table, manifest);
  StateMatch match;
  std::vector<std::pair<at::Tensor, int64_t>> tensors;
  for (const StateTable::Slot& slot : table.slots()) {
    const FlatParameter& flat = *flats[static_cast<size_t>(slot.flat)];
    const Range range = flat.layout().slot(slot.slot);
    tensors.clear();
    for (const Parameter& p : flat.parameters()) {
      if (p.slot == slot.slot) {
        tensors.emplace_back(p.tensor, p.range.begin - range.begin);
      }
    }
    match.slots_.push_back(
        matcher.Match(range.numel(), tensors, /*contiguous=*/false));
  }
  for (const StateTable::Plain& plain : table.plain()) {
    match.plain_.push_back(
        matcher.Match(plain.tensor.numel() * NumbersPer(plain.tensor),
                      {{plain.tensor, 0}}, /*contiguous=*/true));
  }
  for (const auto& storage : manifest.storages()) {
    for (const auto& tensor : storage.tensors()) {
      match.steps_[tensor.name()] = tensor.steps();
    }
  }
  TESSERA_RETURN_IF_ERROR(matcher.Result());
  return match;
}

int64_t StateMatch::steps(const std::string& name) const {
  const auto it = steps_.find(name);
  return it == steps_.end() ? 0 : it->second;
}

}  // namespace tessera
