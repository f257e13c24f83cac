// LoadState; saving is in training_state.cc.
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "ATen/MemoryOverlap.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/copy_memory.h"
#include "engine/access/own_values.h"
#include "engine/access/state_match.h"
#include "engine/access/state_table.h"
#include "engine/access/training_state.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

// What has been read and is not yet in its place.
struct Staged {
  at::Tensor from;      // numbers, of the saved dtype
  int64_t wanted = -1;  // which of those that are read, and its byte of their
  int64_t at = 0;       // memory
  // Where they belong: elements of what a flat's rank owns; or a plain tensor.
  int flat = -1;
  StateTable::State kind = StateTable::kValue;
  Range range;
  at::Tensor plain;
  // What a plain tensor is called there, in ranks' own values.
  std::string own_name;
};

class Loading {
 public:
  Loading(const TrainingState& state, const LoadCheckpointOptions& options,
          const ReadOptions& how, CheckpointReader* reader)
      : state_(state),
        options_(options),
        how_(how),
        reader_(*reader),
        manifest_(reader->manifest()),
        table_(state.flats, state.optimizer, state.module) {}

  // `*changed`: something may have changed, of which an error tells.
  absl::StatusOr<LoadedState> Run(bool* changed) {
    const absl::Status prepared = Prepare();
    if (!prepared.ok()) {
      for (const at::Tensor& zeros : zeros_) zeros.zero_();
      if (state_.optimizer != nullptr && !old_has_state_.empty()) {
        (void)state_.optimizer->MatchStates(old_has_state_);
      }
      return prepared;
    }
    // Nothing is refused from here on.
    *changed = true;
    TESSERA_RETURN_IF_ERROR(Agree([&] { return Apply(); }));
    return std::move(loaded_);
  }

 private:
  template <class Work>
  absl::Status Agree(const Work& work) {
    return state_.comm->AgreeOk(CatchTorch("LoadCheckpoint", work),
                                "LoadCheckpoint");
  }

  absl::Status Prepare() {
    TESSERA_RETURN_IF_ERROR(Agree([&] { return Plan(); }));
    TESSERA_RETURN_IF_ERROR(state_.comm->AgreeEqual(
        absl::StrCat(options_.model_only ? "the model alone of " : "",
                     match_->Describe()),
        "part of the checkpoint to load"));
    std::vector<proto::CheckpointValue> values;
    TESSERA_RETURN_IF_ERROR(
        ReadCheckpoint(&reader_, wanted_, how_, state_.comm, &values));
    loaded_.report.bytes_read = reader_.bytes_read();
    for (proto::CheckpointValue& value : values) {
      values_[value.name()] = std::move(*value.mutable_value());
    }
    return Agree([&] { return CheckValues(); });
  }

  absl::Status Plan() {
    const std::string what = absl::StrCat("checkpoint ", reader_.path());
    match_ = StateMatch::Create(table_, state_.flats, manifest_, options_);
    TESSERA_RETURN_IF_ERROR(Annotate(match_.status(), what));
    TESSERA_RETURN_IF_ERROR(Annotate(CheckTraining(), what));
    TESSERA_RETURN_IF_ERROR(CheckWritable());
    loaded_.report.missing = match_->missing();
    loaded_.report.unexpected = match_->unexpected();
    if (loads_states_) TESSERA_RETURN_IF_ERROR(PlanStates());
    for (size_t s = 0; s < table_.slots().size(); ++s) PlanSlot(s);
    for (size_t i = 0; i < table_.plain().size(); ++i) PlanPlain(i);
    return TakeMemory();
  }

  // For all that is wanted.
  absl::Status TakeMemory() {
    TESSERA_ASSIGN_OR_RETURN(
        memory_,
        CopyMemory::Allocate(memory_bytes_, CopyMemory::Pages::kSmall));
    for (Staged& one : staged_) {
      if (one.wanted < 0) continue;
      WantedElements& wanted = wanted_[static_cast<size_t>(one.wanted)];
      wanted.to = memory_.data() + one.at;
      const std::string& dtype =
          manifest_.storages(wanted.storage).states(wanted.state).dtype();
      one.from = TensorOver(wanted.to, {wanted.end - wanted.begin}, {1},
                            DtypeOfCheckpoint(dtype), at::kCPU);
    }
    return absl::OkStatus();
  }

  // Memory for states that are to come; those that are to go are dropped once
  // nothing can fail.
  absl::Status PlanStates() {
    std::vector<uint8_t> both = state_.optimizer->has_state();
    old_has_state_ = both;
    has_state_.assign(both.size(), 0);
    for (size_t s = 0; s < table_.slots().size(); ++s) {
      const StateMatch::Place& place = match_->slot(s);
      const size_t flat = static_cast<size_t>(table_.slots()[s].flat);
      if (place.loaded() ? place.states[StateTable::kExpAvg] >= 0
                         : old_has_state_[flat] != 0) {
        has_state_[flat] = both[flat] = 1;
      }
    }
    return state_.optimizer->MatchStates(both);
  }

  absl::Status CheckTraining() const {
    if (options_.model_only) return absl::OkStatus();
    const proto::CheckpointTraining& training = manifest_.training();
    if (state_.optimizer != nullptr && training.optimizer() != "adamw") {
      return absl::FailedPreconditionError(absl::StrCat(
          "the checkpoint holds ",
          training.has_optimizer() ? absl::StrCat("states of the optimizer '",
                                                  training.optimizer(), "'")
                                   : "no optimizer states",
          ", and this run trains with 'adamw'; "
          "LoadCheckpointOptions::model_only loads parameters and buffers "
          "alone"));
    }
    bool counts = manifest_.step() >= 0;
    for (const auto& storage : manifest_.storages()) {
      for (const auto& tensor : storage.tensors()) {
        counts &= tensor.steps() >= 0;
      }
    }
    const double rate = training.learning_rate();
    if (!counts || !std::isfinite(rate) || rate < 0) {
      return absl::DataLossError(absl::StrCat(
          "it says that it is of step ", manifest_.step(),
          " with the learning rate ", rate, ", or has steps below 0"));
    }
    return absl::OkStatus();
  }

  // Tensors that each rank has whole are written in place.
  absl::Status CheckWritable() const {
    for (const StateTable::Plain& plain : table_.plain()) {
      const at::Tensor& t = plain.tensor;
      if (!match_->plain(static_cast<size_t>(&plain - table_.plain().data()))
               .loaded()) {
        continue;
      }
      if (!t.is_inference() && !t.is_conj() && !t.is_neg() &&
          at::has_internal_overlap(t) != at::MemOverlap::Yes) {
        continue;
      }
      return absl::FailedPreconditionError(absl::StrCat(
          "'", table_.NamesOf(t)[0],
          "' cannot be written in place (expanded, "
          "conjugated or negated without a copy, or of inference mode); "
          "register a clone of it"));
    }
    return absl::OkStatus();
  }

  void Want(const StateMatch::Place& place, int64_t begin, Staged staged,
            int64_t numel) {
    const int number = place.states[staged.kind];
    if (number < 0) {  // never stepped there, in a flat whose others were
      staged.from = at::zeros({numel});
    } else {
      const std::string& dtype =
          manifest_.storages(place.storage).states(number).dtype();
      staged.wanted = static_cast<int64_t>(wanted_.size());
      staged.at = memory_bytes_;
      constexpr int64_t kAlign = 64;
      memory_bytes_ +=
          (numel * DtypeBytes(dtype) + kAlign - 1) / kAlign * kAlign;
      wanted_.push_back({place.storage, number, begin, begin + numel, nullptr});
    }
    staged_.push_back(std::move(staged));
  }

  // Whether elements, as the checkpoint has them in `dtype`, can be read to
  // where they belong.
  static bool InPlace(const at::Tensor& elements, const std::string& dtype) {
    return elements.is_cpu() && elements.is_contiguous() &&
           elements.scalar_type() == DtypeOfCheckpoint(dtype);
  }

  // Those that a rank owns of a flat. States that are zeros, as those of a new
  // engine, are read to where they belong, and become zeros again if the load
  // fails; what else is to be overwritten is staged.
  void WantOwned(const StateMatch::Place& place, int64_t begin, int flat,
                 StateTable::State kind, Range range) {
    const int number = place.states[kind];
    const bool in_memory =
        kind != StateTable::kValue && table_.Buffer(flat, kind)->in_memory();
    const at::Tensor elements =
        in_memory ? table_.Elements(flat, kind) : at::Tensor();
    if (number < 0 || !in_memory || !state_.optimizer->has_zeros(flat) ||
        !InPlace(elements,
                 manifest_.storages(place.storage).states(number).dtype())) {
      Staged staged;
      staged.flat = flat;
      staged.kind = kind;
      staged.range = range;
      Want(place, begin, std::move(staged), range.numel());
      return;
    }
    char* const to =
        static_cast<char*>(elements.mutable_data_ptr()) +
        range.begin * static_cast<int64_t>(elements.element_size());
    wanted_.push_back(
        {place.storage, number, begin, begin + range.numel(), to});
    zeros_.push_back(elements.slice(0, range.begin, range.end));
  }

  void PlanSlot(size_t s) {
    const StateTable::Slot& slot = table_.slots()[s];
    const FlatParameter& flat = *state_.flats[static_cast<size_t>(slot.flat)];
    const Range part = table_.Part(slot, flat.owned());
    const StateMatch::Place& place = match_->slot(s);
    if (part.empty() || !place.loaded()) return;
    const int64_t begin =
        part.begin - flat.layout().slot(slot.slot).begin + place.shift;
    const Range range = {part.begin - flat.owned().begin,
                         part.end - flat.owned().begin};
    for (StateTable::State kind :
         {StateTable::kValue, StateTable::kExpAvg, StateTable::kExpAvgSq}) {
      if (!table_.Has(slot.flat, kind)) continue;
      if (kind != StateTable::kValue && !loads_states_) continue;
      WantOwned(place, begin, slot.flat, kind, range);
    }
  }

  void PlanPlain(size_t i) {
    const StateMatch::Place& place = match_->plain(i);
    if (!place.loaded()) return;
    const at::Tensor& tensor = table_.plain()[i].tensor;
    Staged staged;
    staged.plain = tensor.detach();
    if (tensor.is_complex()) staged.plain = at::view_as_real(staged.plain);
    staged.own_name = manifest_.storages(place.storage).tensors(0).name();
    const int64_t numel = staged.plain.numel();
    Want(place, place.shift, std::move(staged), numel);
  }

  // What this rank has of its own, and whether it can be taken over.
  absl::Status CheckValues() {
    // One that was made into other files has them of those that saved it.
    const int world_size = state_.comm->world_size();
    same_ranks_ = manifest_.files_size() == world_size &&
                  manifest_.training().world_size() == world_size;
    loaded_.step = manifest_.step();
    loaded_.report.world_size = manifest_.training().world_size();
    loaded_.report.stage = manifest_.training().stage();
    loaded_.report.client_state = values_[kClientState];
    if (same_ranks_) TESSERA_RETURN_IF_ERROR(TakeOwnTensors());
    if (options_.model_only) return absl::OkStatus();
    if (same_ranks_) {
      for (const NamedGenerator& one : GeneratorsOf(state_.device)) {
        const auto it = values_.find(one.name);
        if (it == values_.end()) continue;  // of another kind of device
        one.generator.clone().set_state(GeneratorState(it->second));
      }
    }
    if (state_.scaler != nullptr && manifest_.training().has_loss_scale()) {
      LossScaler copy = *state_.scaler;
      TESSERA_RETURN_IF_ERROR(copy.Restore(SavedScaler()));
    }
    return absl::OkStatus();
  }

  // In place of rank 0's.
  absl::Status TakeOwnTensors() {
    for (Staged& one : staged_) {
      if (one.own_name.empty()) continue;
      const auto it = values_.find(absl::StrCat(kOwnTensor, one.own_name));
      if (it == values_.end()) continue;
      if (it->second.size() != one.from.nbytes()) {
        return absl::DataLossError(absl::StrCat(
            "checkpoint ", reader_.path(), ": rank ", state_.comm->rank(),
            "'s own '", one.own_name, "' has ", it->second.size(),
            " bytes, expected ", one.from.nbytes()));
      }
      std::copy(it->second.begin(), it->second.end(),
                static_cast<char*>(one.from.mutable_data_ptr()));
    }
    return absl::OkStatus();
  }

  LossScalerState SavedScaler() const {
    const proto::CheckpointTraining& training = manifest_.training();
    LossScalerState scaler;
    scaler.scale = training.loss_scale();
    scaler.clean_steps = training.clean_steps();
    scaler.hysteresis_left = training.hysteresis_left();
    scaler.skipped_steps = training.skipped_steps();
    return scaler;
  }

  absl::Status Apply() {
    // First, since what has no states has no masters either.
    if (loads_states_) {
      TESSERA_RETURN_IF_ERROR(state_.optimizer->MatchStates(has_state_));
    }
    for (const Staged& one : staged_) TESSERA_RETURN_IF_ERROR(Place(one));
    TESSERA_RETURN_IF_ERROR(Lower());
    if (loads_states_) {
      for (size_t f = 0; f < has_state_.size(); ++f) {
        if (has_state_[f] != 0) {
          state_.optimizer->SetWritten(static_cast<int>(f));
        }
      }
    }
    if (options_.model_only) return absl::OkStatus();
    if (loads_states_) {
      for (const auto& flat : state_.flats) {
        for (const auto& p : flat->parameters()) {
          int64_t& steps =
              state_.optimizer->parameter_steps()[static_cast<size_t>(p.index)];
          steps = match_->steps(p.tensor).value_or(steps);
        }
      }
      if (state_.program_rate != nullptr) TakeRate();
    }
    if (state_.scaler != nullptr && manifest_.training().has_loss_scale()) {
      TESSERA_RETURN_IF_ERROR(state_.scaler->Restore(SavedScaler()));
    }
    if (!same_ranks_) return absl::OkStatus();
    for (const NamedGenerator& one : GeneratorsOf(state_.device)) {
      const auto it = values_.find(one.name);
      if (it == values_.end()) continue;
      at::Generator generator = one.generator;
      generator.set_state(GeneratorState(it->second));
    }
    return absl::OkStatus();
  }

  void TakeRate() {
    const proto::CheckpointTraining& training = manifest_.training();
    state_.program_rate->reset();
    if (training.has_learning_rate()) {
      *state_.program_rate = training.learning_rate();
    }
    state_.optimizer->SetRate(
        state_.program_rate->value_or(state_.optimizer->configured_rate()));
  }

  absl::Status Place(const Staged& one) {
    if (one.flat < 0) {
      one.plain.copy_(one.from.view(one.plain.sizes()));
      return absl::OkStatus();
    }
    if (!table_.Has(one.flat, one.kind)) return absl::OkStatus();
    if (one.flat != raised_flat_) TESSERA_RETURN_IF_ERROR(Lower());
    raised_flat_ = one.flat;
    TESSERA_ASSIGN_OR_RETURN(Raised raised,
                             Raised::Of(table_.Buffer(one.flat, one.kind)));
    raised_.push_back(std::move(raised));
    table_.Elements(one.flat, one.kind)
        .slice(0, one.range.begin, one.range.end)
        .copy_(one.from);
    return absl::OkStatus();
  }

  // What lies on a disk is in memory for one flat at a time.
  absl::Status Lower() {
    absl::Status status;
    for (Raised& raised : raised_) status.Update(raised.Commit());
    raised_.clear();
    return status;
  }

  const TrainingState& state_;
  const LoadCheckpointOptions& options_;
  const ReadOptions how_;
  CheckpointReader& reader_;
  const proto::CheckpointManifest& manifest_;
  const StateTable table_;
  absl::StatusOr<StateMatch> match_ = absl::UnknownError("not matched");
  std::vector<uint8_t> has_state_, old_has_state_;
  std::vector<WantedElements> wanted_;
  std::vector<at::Tensor> zeros_;  // states that are read to their place
  CopyMemory memory_;              // what is wanted; nothing of it is kept
  int64_t memory_bytes_ = 0;
  std::vector<Staged> staged_;
  std::vector<Raised> raised_;  // by Place, of this flat
  int raised_flat_ = -1;
  std::map<std::string, std::string> values_;
  const bool loads_states_ =
      state_.optimizer != nullptr && !options_.model_only;
  bool same_ranks_ = false;
  LoadedState loaded_;
};

}  // namespace

absl::StatusOr<LoadedState> LoadState(const std::string& dir,
                                      const TrainingState& state,
                                      const LoadCheckpointOptions& options,
                                      bool* changed) {
  *changed = false;
  TorchScope scope;
  const ReadOptions how = {options.node_local.value_or(state.node_local),
                           state.device};
  TESSERA_RETURN_IF_ERROR(state.comm->AgreeEqual(
      how.node_local ? "each host's own" : "one of all ranks",
      "kind of folder to load from"));
  TESSERA_ASSIGN_OR_RETURN(CheckpointReader reader,
                           OpenCheckpoint(dir, how, state.comm));
  return Loading(state, options, how, &reader).Run(changed);
}

}  // namespace tessera
