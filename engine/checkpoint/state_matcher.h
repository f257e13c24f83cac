// StateMatcher: what StateMatch::Create finds its places with.
#ifndef ENGINE_CHECKPOINT_STATE_MATCHER_H_
#define ENGINE_CHECKPOINT_STATE_MATCHER_H_

#include <torch/torch.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "checkpoint/checkpoint.h"
#include "engine/checkpoint/state_match.h"
#include "engine/checkpoint/state_table.h"
#include "sharding/partition/names.h"

namespace tessera {

// Finds a model's tensors in a manifest, and collects what does not fit.
class StateMatcher {
 public:
  // A tensor, its numbers of the storage that it lies in, and how a checkpoint
  // has it.
  struct View {
    at::Tensor tensor;
    Range range;
    std::vector<int64_t> sizes, strides;
  };

  StateMatcher(const StateTable& table,
               const proto::CheckpointManifest& manifest,
               const LoadCheckpointOptions& options)
      : table_(table),
        manifest_(manifest),
        options_(options),
        only_("LoadCheckpointOptions::only", options.only) {
    for (int s = 0; s < manifest.storages_size(); ++s) {
      for (const auto& tensor : manifest.storages(s).tensors()) {
        saved_[tensor.name()] = {s, &tensor};
      }
    }
  }

  // The place of a storage of `numel` numbers that holds `views`; nullptr: of
  // a tensor that each rank has whole.
  StateMatch::Place Match(int64_t numel, absl::Span<const View> views,
                          const StateTable::Slot* slot) {
    const int num_states = slot == nullptr || options_.model_only
                               ? StateTable::kFirst
                               : table_.num_states(slot->flat);
    std::optional<StateMatch::Place> place;
    std::vector<const View*> found, left;
    for (const View& view : views) {
      const at::Tensor& tensor = view.tensor;
      const Saved* const saved = Find(tensor);
      (saved == nullptr ? left : found).push_back(&view);
      if (saved == nullptr) continue;
      CheckSizes(view, *saved->tensor);
      const int64_t shift =
          saved->tensor->offset() * NumbersPer(tensor) - view.range.begin;
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
    CheckLeft(found, left);
    const proto::CheckpointStorage& storage =
        manifest_.storages(place->storage);
    if (place->shift < 0 || place->shift + numel > storage.numel()) {
      wrong_.push_back(absl::StrCat("'", storage.tensors(0).name(),
                                    "': ", storage.numel(),
                                    " numbers, expected ", numel));
    }
    for (int i = 0; i < storage.states_size(); ++i) {
      for (int known = 0; known < num_states; ++known) {
        const int flat = slot == nullptr ? 0 : slot->flat;
        if (storage.states(i).name() == table_.NameOf(flat, known)) {
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
    if (num_states > StateTable::kFirst) {
      CheckStates(storage, slot->flat, num_states, *place);
    }
    // Numbers with a point are cast to each other, as LoadSafetensors does.
    const std::string& saved = storage.states(value).dtype();
    const at::ScalarType dtype = NumberDtype(views[0].tensor);
    if (saved != CheckpointDtype(dtype) &&
        !(at::isFloatingType(dtype) &&
          at::isFloatingType(DtypeOfCheckpoint(saved)))) {
      wrong_.push_back(absl::StrCat("'", storage.tensors(0).name(), "' is of ",
                                    saved, " there, of ", c10::toString(dtype),
                                    " here"));
    }
    return *place;
  }

  // The storages of shaped states; -1: none. FailedPrecondition.
  absl::StatusOr<std::vector<int>> MatchShaped() const {
    std::vector<int> found;
    absl::flat_hash_map<const at::TensorImpl*, bool> any;
    for (const StateTable::Shaped& shaped : table_.shaped()) {
      const at::Tensor& parameter = table_.ParameterOf(shaped);
      const proto::CheckpointTensor* const there = FoundFor(parameter);
      found.push_back(there == nullptr ? -1 : StorageOf(*there, shaped.name));
      bool good =
          there == nullptr ||
          any.try_emplace(parameter.unsafeGetTensorImpl(), found.back() >= 0)
                  .first->second == (found.back() >= 0);
      if (found.back() >= 0) {
        const auto& storage = manifest_.storages(found.back());
        good &=
            storage.states_size() == 1 &&
            storage.states(0).name() == shaped.name &&
            at::isFloatingType(DtypeOfCheckpoint(storage.states(0).dtype())) &&
            at::IntArrayRef(storage.tensors(0).sizes()).equals(shaped.sizes);
      }
      if (good) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("'", table_.NamesOf(parameter)[0],
                       "' has not all of the optimizer's states, "
                       "or not as floating numbers of the shape of '",
                       shaped.name, "'"));
    }
    return found;
  }

  // What has been found of a tensor; nullptr: nothing.
  const proto::CheckpointTensor* FoundFor(const at::Tensor& tensor) const {
    const auto it = found_for_.find(tensor.unsafeGetTensorImpl());
    return it == found_for_.end() ? nullptr : it->second;
  }

  // Where what one of the two lacks is no error, it goes to the lists.
  absl::Status Result(std::vector<std::string>* missing,
                      std::vector<std::string>* unexpected,
                      std::vector<std::string>* late) {
    if (!options_.only.empty()) {
      TESSERA_RETURN_IF_ERROR(only_.CheckMatched(names_, false));
    } else {
      FindUnexpected();
    }
    std::vector<std::string> faults;
    if (!options_.strict) {
      *missing = std::move(missing_);
      *unexpected = std::move(unexpected_);
      *late = std::move(late_);
    } else if (!missing_.empty()) {
      faults.push_back(absl::StrCat("lacks ", Some(missing_)));
    }
    if (options_.strict && !late_.empty()) {
      faults.push_back(absl::StrCat(
          "lacks ", Some(late_),
          ", states of ema_decay, amsgrad, momentum or centered, which the run "
          "that saved it had not set: with LoadCheckpointOptions::strict = "
          "false they begin now; LoadCheckpointOptions::model_only loads "
          "values alone"));
    }
    if (options_.strict && !unexpected_.empty()) {
      faults.push_back(absl::StrCat("holds ", Some(unexpected_),
                                    ", which the module lacks"));
    }
    const bool it = !faults.empty();
    if (!wrong_.empty()) faults.push_back(Some(wrong_, ""));
    if (faults.empty()) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("the checkpoint is of another model: ", it ? "it " : "",
                     absl::StrJoin(faults, "; ")));
  }

 private:
  struct Saved {
    int storage = 0;
    const proto::CheckpointTensor* tensor = nullptr;
  };

  // The storage of a parameter's shaped state; -1: there is none.
  int StorageOf(const proto::CheckpointTensor& parameter,
                const std::string& state) const {
    const auto it = saved_.find(absl::StrCat(parameter.name(), "/", state));
    if (it == saved_.end()) return -1;
    const int storage = it->second.storage;
    return manifest_.storages(storage).shaped_state() ? storage : -1;
  }

  static bool SameView(const proto::CheckpointTensor& a,
                       const proto::CheckpointTensor& b) {
    return a.offset() == b.offset() && a.complex() == b.complex() &&
           at::IntArrayRef(a.sizes()).equals(b.sizes()) &&
           at::IntArrayRef(a.strides()).equals(b.strides());
  }

  // A storage is loaded as a whole: what shares it and is to be left alone must
  // lie within what is loaded.
  void CheckLeft(const std::vector<const View*>& found,
                 const std::vector<const View*>& left) {
    for (const View* one : left) {
      const bool within =
          std::any_of(found.begin(), found.end(), [one](const View* other) {
            return other->range.begin <= one->range.begin &&
                   one->range.end <= other->range.end;
          });
      if (within) continue;
      wrong_.push_back(
          absl::StrCat("'", table_.NamesOf(found[0]->tensor)[0],
                       "' shares memory with '", table_.NamesOf(one->tensor)[0],
                       "', which is not loaded: load both or neither"));
    }
  }

  // One state without another would be wrong updates, unless it may begin late.
  void CheckStates(const proto::CheckpointStorage& storage, int flat,
                   int num_states, const StateMatch::Place& place) {
    bool good = storage.states_size() == 1 || place.has_states();
    std::vector<std::string> late;
    for (int state = StateTable::kFirst; state < num_states; ++state) {
      const int number = place.states[state];
      if (number < 0 && place.has_states()) {
        late.push_back(absl::StrCat(storage.tensors(0).name(), " (",
                                    table_.NameOf(flat, state), ")"));
        good &= table_.MayBeginLate(flat, state);
      }
      good &=
          number < 0 ||
          at::isFloatingType(DtypeOfCheckpoint(storage.states(number).dtype()));
    }
    if (good) {
      late_.insert(late_.end(), late.begin(), late.end());
      return;
    }
    wrong_.push_back(
        absl::StrCat("'", storage.tensors(0).name(),
                     "' has not all of the optimizer's states (a run with "
                     "another optimizer?), or not as floating numbers; "
                     "LoadCheckpointOptions::model_only loads values alone"));
  }

  // The module has it, or what is the same under another name.
  bool IsFound(const proto::CheckpointStorage& storage,
               const proto::CheckpointTensor& tensor) const {
    for (const auto& other : storage.tensors()) {
      if (found_.contains(other.name()) && SameView(other, tensor)) return true;
    }
    return false;
  }

  void FindUnexpected() {
    for (const auto& storage : manifest_.storages()) {
      if (storage.shaped_state()) continue;  // MatchShaped
      for (const auto& tensor : storage.tensors()) {
        if (!IsFound(storage, tensor)) unexpected_.push_back(tensor.name());
      }
    }
  }

  // By its name, or that of a module around it.
  bool IsWanted(const std::string& name) {
    names_.push_back(name);
    if (options_.only.empty()) return true;
    bool wanted = only_.Match(name);
    for (size_t dot = name.find('.'); dot != std::string::npos;
         dot = name.find('.', dot + 1)) {
      wanted |= only_.Match(absl::string_view(name).substr(0, dot));
    }
    return wanted;
  }

  // By any of its names; tied ones may have been named by another. Null: it is
  // not there, or is to be left alone.
  const Saved* Find(const at::Tensor& tensor) {
    const std::vector<std::string>& names = table_.NamesOf(tensor);
    bool wanted = false;
    for (const std::string& name : names) wanted |= IsWanted(name);
    if (!wanted) return nullptr;
    wanted = false;
    const Saved* found = nullptr;
    for (const std::string& name : names) {
      const NameMap::Name theirs = options_.names.Theirs(name);
      if (theirs.name.empty()) continue;
      wanted = true;
      const auto it = saved_.find(theirs.name);
      if (it == saved_.end()) continue;
      found_.insert(theirs.name);
      if (theirs.transposed) {
        wrong_.push_back(absl::StrCat("'", theirs.name,
                                      "' cannot be transposed while a "
                                      "checkpoint is loaded"));
      }
      if (found == nullptr) {
        found = &it->second;
      } else if (it->second.storage != found->storage ||
                 !SameView(*it->second.tensor, *found->tensor)) {
        wrong_.push_back(absl::StrCat("'", theirs.name, "' and '",
                                      found->tensor->name(),
                                      "' are one here, and two there"));
      }
    }
    if (found != nullptr) {
      found_for_[tensor.unsafeGetTensorImpl()] = found->tensor;
    } else if (wanted) {
      missing_.push_back(names[0]);
    }
    return found;
  }

  void CheckSizes(const View& view, const proto::CheckpointTensor& saved) {
    const at::Tensor& tensor = view.tensor;
    const at::IntArrayRef sizes = saved.sizes(), strides = saved.strides();
    const auto shape = [](at::IntArrayRef of) {
      return absl::StrCat("[", absl::StrJoin(of, ", "), "]");
    };
    if (view.sizes != sizes || tensor.is_complex() != saved.complex()) {
      wrong_.push_back(absl::StrCat(
          "'", saved.name(), "' is ", saved.complex() ? "complex " : "",
          shape(sizes), " there, ", tensor.is_complex() ? "complex " : "",
          shape(view.sizes), " here"));
      return;
    }
    const std::vector<int64_t>& own = view.strides;
    if (PlainStrides(sizes, own) != PlainStrides(sizes, strides)) {
      wrong_.push_back(absl::StrCat("'", saved.name(), "' has strides ",
                                    shape(strides), " there, ", shape(own),
                                    " here (another memory format)"));
    }
  }

  static std::string Some(const std::vector<std::string>& all,
                          const char* quote = "'") {
    constexpr size_t kMaxNamed = 8;
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
  const LoadCheckpointOptions& options_;
  PathPatterns only_;
  std::vector<std::string> names_;  // of the module
  absl::flat_hash_map<std::string, Saved> saved_;
  absl::flat_hash_set<std::string> found_;
  absl::flat_hash_map<const at::TensorImpl*, const proto::CheckpointTensor*>
      found_for_;
  std::vector<std::string> missing_, unexpected_, wrong_;
  std::vector<std::string> late_;  // "NAME (STATE)"
};

}  // namespace tessera
#endif  // ENGINE_CHECKPOINT_STATE_MATCHER_H_
