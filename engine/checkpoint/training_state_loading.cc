// LoadState; saving is in training_state.cc.
#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/together.h"
#include "config/config.pb.h"
#include "engine/checkpoint/own_values.h"
#include "engine/checkpoint/state_match.h"
#include "engine/checkpoint/state_reads.h"
#include "engine/checkpoint/state_table.h"
#include "engine/checkpoint/training_state.h"
#include "optim/algorithms/algorithm.h"
#include "optim/algorithms/option_names.h"
#include "optim/kernels/shaped_states.h"
#include "optim/schedule/plateau.h"

namespace tessera {
namespace {

class StateLoading {
 public:
  StateLoading(const TrainingState& state, const LoadCheckpointOptions& options,
               const ReadOptions& how, CheckpointReader* reader)
      : state_(state),
        options_(options),
        how_(how),
        reader_(*reader),
        manifest_(reader->manifest()),
        table_(state.model.flats(), state.optimizer(), state.model.module()),
        reads_(state.model.flats(), state.optimizer(), table_, manifest_) {}

  // `*changed`: something may have changed, of which an error tells.
  absl::StatusOr<LoadedState> Run(bool* changed) {
    const absl::Status prepared = Prepare();
    if (!prepared.ok()) {
      reads_.Undo();
      if (state_.optimizer() != nullptr && !old_has_state_.empty()) {
        (void)state_.optimizer()->states().Match(old_has_state_);
      }
      return prepared;
    }
    // Nothing is refused from here on.
    *changed = true;
    TESSERA_RETURN_IF_ERROR(Agree([&] { return Place(); }));
    TESSERA_RETURN_IF_ERROR(RunTogether(state_.comm(), "LoadCheckpoint", [&] {
      TorchScope scope;
      return reads_.ReadAgain(&reader_);
    }));
    TESSERA_RETURN_IF_ERROR(Agree([&] { return Resume(); }));
    loaded_.report.bytes_read = reader_.bytes_read();
    LogLateStates();
    return std::move(loaded_);
  }

 private:
  void LogLateStates() const {
    const std::vector<std::string>& late = match_->late();
    if (late.empty()) return;
    TESSERA_LOG_RANK0(WARNING)
        << "checkpoint " << reader_.path() << ": " << late.size()
        << " states of the optimizer are not there and begin now: an average "
           "with the values, others with zeros: "
        << late[0] << (late.size() > 1 ? ", ..." : "");
  }

  template <class Work>
  absl::Status Agree(const Work& work) {
    return state_.comm()->AgreeOk(CatchTorch("LoadCheckpoint", work),
                                  "LoadCheckpoint");
  }

  absl::Status Prepare() {
    TESSERA_RETURN_IF_ERROR(Agree([&] { return Plan(); }));
    TESSERA_RETURN_IF_ERROR(state_.comm()->AgreeEqual(
        absl::StrCat(options_.model_only ? "the model alone of " : "",
                     match_->Describe()),
        "part of the checkpoint to load"));
    std::vector<proto::CheckpointValue> values;
    TESSERA_RETURN_IF_ERROR(ReadCheckpoint(&reader_, reads_.Wanted(), how_,
                                           state_.comm(), &values));
    for (proto::CheckpointValue& value : values) {
      values_[value.name()] = std::move(*value.mutable_value());
    }
    return Agree([&] { return CheckValues(); });
  }

  absl::Status Plan() {
    const std::string what = absl::StrCat("checkpoint ", reader_.path());
    TESSERA_RETURN_IF_ERROR(Annotate(CheckTraining(), what));
    match_ =
        StateMatch::Create(table_, state_.model.flats(), manifest_, options_);
    TESSERA_RETURN_IF_ERROR(Annotate(match_.status(), what));
    if (loads_states_) {
      TESSERA_RETURN_IF_ERROR(Annotate(TakeOptions(), what));
      TESSERA_RETURN_IF_ERROR(Annotate(TakeAverages(), what));
    }
    TESSERA_RETURN_IF_ERROR(reads_.CheckWritable(*match_));
    loaded_.report.missing = match_->missing();
    loaded_.report.missing.insert(loaded_.report.missing.end(),
                                  match_->late().begin(), match_->late().end());
    loaded_.report.unexpected = match_->unexpected();
    if (loads_states_) TESSERA_RETURN_IF_ERROR(PlanStates());
    return reads_.Plan(*match_, loads_states_);
  }

  // Memory for states that are to come; those that are to go are dropped once
  // nothing can fail.
  absl::Status PlanStates() {
    std::vector<uint8_t> both = state_.optimizer()->states().has();
    old_has_state_ = both;
    has_state_.assign(both.size(), 0);
    for (size_t s = 0; s < table_.slots().size(); ++s) {
      const StateMatch::Place& place = match_->slot(s);
      const size_t flat = static_cast<size_t>(table_.slots()[s].flat);
      const int count = table_.num_states(table_.slots()[s].flat);
      const bool keeps =
          count > StateTable::kFirst ||
          HasShapedStates(state_.optimizer()->states().FormulaOf(flat));
      const bool saved = keeps ? place.has_states() : old_has_state_[flat] != 0;
      if (place.loaded() ? saved : old_has_state_[flat] != 0) {
        has_state_[flat] = both[flat] = 1;
      }
    }
    for (size_t i = 0; i < table_.shaped().size(); ++i) {
      const auto flat = static_cast<size_t>(table_.shaped()[i].flat);
      if (match_->shaped(i) >= 0) has_state_[flat] = both[flat] = 1;
    }
    return state_.optimizer()->states().Match(both);
  }

  absl::Status CheckTraining() const {
    if (options_.model_only) return absl::OkStatus();
    const proto::CheckpointTraining& training = manifest_.training();
    const std::string mine =
        state_.optimizer() == nullptr ? "" : state_.optimizer()->name();
    const std::string& theirs = training.optimizer();
    const bool related = StateTable::AreRelated(theirs, mine);
    if (state_.optimizer() != nullptr && theirs != mine &&
        (options_.strict || !related)) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the checkpoint holds ",
          training.has_optimizer()
              ? absl::StrCat("states of the optimizer '", theirs, "'")
              : "no optimizer states",
          ", and this run trains with '", mine, "'; ",
          related ? "LoadCheckpointOptions::strict = false loads the states "
                    "that both have, and the others begin now; "
                  : "",
          "LoadCheckpointOptions::model_only loads parameters and buffers "
          "alone"));
    }
    bool counts = manifest_.step() >= 0 && training.skipped_steps() >= 0 &&
                  training.samples() >= 0;
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
    if (!Plateau::IsPossible(SavedPlateau())) {
      return absl::DataLossError(
          "its state of ReduceLROnPlateau (best, counts) is none");
    }
    return absl::OkStatus();
  }

  // What this rank has of its own, and whether it can be taken over.
  absl::Status CheckValues() {
    // One that was made into other files has them of those that saved it.
    const int world_size = state_.comm()->world_size();
    same_ranks_ = manifest_.files_size() == world_size &&
                  manifest_.training().world_size() == world_size &&
                  std::max(manifest_.training().tensor_ranks(), 1) ==
                      state_.model.mesh().size(kTp) &&
                  std::max(manifest_.training().sequence_ranks(), 1) ==
                      state_.model.mesh().size(kCp) &&
                  std::max(manifest_.training().pipeline_ranks(), 1) ==
                      state_.model.mesh().size(kPp);
    loaded_.step = manifest_.step();
    const proto::CheckpointTraining& training = manifest_.training();
    loaded_.skipped_steps = training.skipped_steps();
    if (training.has_samples()) loaded_.samples = training.samples();
    if (training.has_train_batch_size()) {
      loaded_.batch = training.train_batch_size();
    }
    loaded_.report.world_size = manifest_.training().world_size();
    loaded_.report.stage = manifest_.training().stage();
    loaded_.report.client_state = values_[kClientState];
    loaded_.report.manager_state = training.manager_state();
    if (same_ranks_) {
      TESSERA_RETURN_IF_ERROR(
          Annotate(reads_.TakeOwn(values_),
                   absl::StrCat("checkpoint ", reader_.path(), ": rank ",
                                state_.comm()->rank())));
    }
    if (options_.model_only) return absl::OkStatus();
    if (same_ranks_) {
      for (const NamedGenerator& one : GeneratorsOf(state_.model.device())) {
        const auto it = values_.find(one.name);
        if (it == values_.end()) continue;  // of another kind of device
        one.generator.clone().set_state(GeneratorState(it->second));
      }
    }
    if (state_.scaler() != nullptr && manifest_.training().has_loss_scale()) {
      LossScaler copy = *state_.scaler();
      TESSERA_RETURN_IF_ERROR(copy.Restore(SavedScaler()));
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

  absl::Status Place() {
    // First, since what has no states has no masters either.
    if (loads_states_) {
      TESSERA_RETURN_IF_ERROR(state_.optimizer()->states().Match(has_state_));
    }
    return reads_.Place();
  }

  // Counts, options, the scaler and generators.
  absl::Status Resume() {
    if (loads_states_) {
      for (size_t f = 0; f < has_state_.size(); ++f) {
        if (has_state_[f] != 0) {
          state_.optimizer()->states().SetWritten(f);
        }
      }
    }
    if (options_.model_only) return absl::OkStatus();
    if (loads_states_) {
      std::vector<int64_t>& all = state_.optimizer()->counts().steps();
      for (const auto& flat : state_.model.flats()) {
        for (const auto& p : flat->parameters()) {
          int64_t& steps = all[static_cast<size_t>(p.index)];
          steps = match_->steps(p.tensor).value_or(steps);
        }
      }
      state_.groups.Restore(options_set_);
      state_.optimizer()->counts().SetWeights(weights_);
      Plateau* const plateau = state_.groups.plateau();
      if (plateau != nullptr && manifest_.training().has_plateau()) {
        plateau->Restore(SavedPlateau());
      }
    }
    if (state_.scaler() != nullptr && manifest_.training().has_loss_scale()) {
      TESSERA_RETURN_IF_ERROR(state_.scaler()->Restore(SavedScaler()));
    }
    if (!same_ranks_) return absl::OkStatus();
    for (const NamedGenerator& one : GeneratorsOf(state_.model.device())) {
      const auto it = values_.find(one.name);
      if (it == values_.end()) continue;
      at::Generator generator = one.generator;
      generator.set_state(GeneratorState(it->second));
    }
    return absl::OkStatus();
  }

  PlateauState SavedPlateau() const {
    const proto::CheckpointPlateau& saved = manifest_.training().plateau();
    return {saved.best(), saved.bad_reports(), saved.cooldown_left(),
            saved.reductions()};
  }

  // What the run that saved it had set, in place of what this one has; but the
  // rates of a run without a scheduler are not those that this one's starts
  // from.
  absl::Status TakeOptions() {
    const proto::CheckpointTraining& training = manifest_.training();
    const bool scheduled = state_.groups.schedule() != nullptr;
    options_set_ = state_.groups.configured();
    for (OptimizerOptions& group : options_set_) {
      if (training.has_learning_rate() && !scheduled) {
        group.lr = training.learning_rate();
      }
    }
    std::vector<OptionValues> values(options_set_.size());
    const std::vector<std::string>& names = state_.groups.groups().names;
    for (const proto::CheckpointOption& option : training.options()) {
      const auto it = std::find(names.begin(), names.end(), option.group());
      if (it == names.end()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "it has '", option.name(), "' set of the parameter group '",
            option.group(), "', and this run has no such group (it has '",
            absl::StrJoin(names, "', '"), "')"));
      }
      if (option.name() == "lr" && scheduled) continue;
      values[static_cast<size_t>(it - names.begin())].emplace_back(
          option.name(), option.value());
    }
    for (size_t g = 0; g < values.size(); ++g) {
      TESSERA_RETURN_IF_ERROR(SetOptions(values[g], &options_set_[g]));
    }
    return absl::OkStatus();
  }

  // Without its weights a group's average would begin anew, with the z of the
  // next step alone.
  absl::Status TakeAverages() {
    weights_ = state_.optimizer()->counts().weights();
    for (size_t g = 0; g < weights_.size(); ++g) {
      if (!RowOf(options_set_[g].algorithm).averages) continue;
      const std::string& name = state_.groups.groups().names[g];
      const auto& saved = manifest_.training().averages();
      const auto it = std::find_if(
          saved.begin(), saved.end(),
          [&](const auto& average) { return average.group() == name; });
      if (it == saved.end()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "it has no weights of the average of the parameter group '", name,
            "'; go on with the groups of the run that saved it, or load the "
            "model alone (LoadCheckpointOptions::model_only)"));
      }
      weights_[g] = {it->steps(), it->sum(), it->largest_rate()};
      const bool possible = it->steps() >= 0 && std::isfinite(it->sum()) &&
                            it->sum() >= 0 && it->largest_rate() >= 0 &&
                            std::isfinite(it->largest_rate());
      if (!possible) {
        return absl::DataLossError(
            absl::StrCat("its weights of the average of the parameter group '",
                         name, "' are none"));
      }
    }
    return absl::OkStatus();
  }

  const TrainingState& state_;
  const LoadCheckpointOptions& options_;
  const ReadOptions how_;
  CheckpointReader& reader_;
  const proto::CheckpointManifest& manifest_;
  const StateTable table_;
  absl::StatusOr<StateMatch> match_ = absl::UnknownError("not matched");
  std::vector<uint8_t> has_state_, old_has_state_;
  StateReads reads_;
  std::map<std::string, std::string> values_;
  const bool loads_states_ =
      state_.optimizer() != nullptr && !options_.model_only;
  std::vector<OptimizerOptions> options_set_;
  std::vector<AverageWeights> weights_;
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
  const ReadOptions how = {
      options.node_local.value_or(
          state.config.checkpoint().use_node_local_storage()),
      state.model.device()};
  TESSERA_RETURN_IF_ERROR(state.comm()->AgreeEqual(
      how.node_local ? "each host's own" : "one of all ranks",
      "kind of folder to load from"));
  TESSERA_ASSIGN_OR_RETURN(CheckpointReader reader,
                           OpenCheckpoint(dir, how, state.comm()));
  return StateLoading(state, options, how, &reader).Run(changed);
}

}  // namespace tessera
