#include "engine/checkpoint/training_state.h"

#include <algorithm>
#include <utility>

#include "ATen/detail/CUDAHooksInterface.h"
#include "ATen/ops/empty.h"
#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/crc32c.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "checkpoint/checkpoint.h"
#include "comm/all_gather_values.h"
#include "config/config.pb.h"
#include "config/config_text.h"
#include "engine/api/version.h"
#include "engine/checkpoint/own_values.h"
#include "engine/checkpoint/part_runs.h"
#include "engine/checkpoint/state_table.h"
#include "optim/algorithms/algorithm.h"
#include "optim/algorithms/option_names.h"
#include "optim/custom/custom_optimizer.h"
#include "optim/kernels/block8.h"
#include "optim/schedule/plateau.h"
#include "torch/version.h"

namespace tessera {
namespace {

constexpr int64_t kCutElements = 64;  // slices of replicas

std::string BytesOf(const at::Tensor& tensor) {
  const at::Tensor here = tensor.detach().cpu().contiguous();
  return std::string(static_cast<const char*>(here.const_data_ptr()),
                     here.nbytes());
}

// Returns the numbers of a tensor that is not sharded: complex ones as pairs.
at::Tensor NumbersOf(const at::Tensor& tensor) {
  at::Tensor plain = tensor.detach().resolve_conj().resolve_neg().contiguous();
  if (plain.is_complex()) plain = at::view_as_real(plain);
  return plain.reshape({-1});
}

// The part of what this rank owns that it writes: those that hold the same
// elements take equal shares.
Range ShareOf(const TrainingState& state, const FlatParameter& flat,
              bool divided) {
  const bool sharded = flat.stage().sharded_optimizer;
  const Mesh& mesh = state.model.mesh();
  const absl::string_view axis = sharded ? kDpReplicate : kDpCp;
  int holders = mesh.size(axis), number = mesh.coordinate(axis);
  if (!divided) {  // all ranks of a tensor-parallel group have it
    number = number * mesh.size(kTp) + mesh.coordinate(kTp);
    holders *= mesh.size(kTp);
  }
  const Range owned = flat.owned();
  const int64_t cuts = (owned.numel() + kCutElements - 1) / kCutElements;
  const auto cut = [&](int part) {
    return std::min(owned.end,
                    owned.begin + cuts * part / holders * kCutElements);
  };
  return {cut(number), cut(number + 1)};
}

// The piece is in memory of the host from here on.
absl::Status TakeCopy(SavedPiece* piece) {
  const at::Tensor copy =
      at::empty({piece->numel()}, piece->elsewhere->dtype());
  TESSERA_RETURN_IF_ERROR(piece->ReadElsewhere(
      0, piece->bytes(), static_cast<char*>(copy.mutable_data_ptr())));
  piece->elements = copy;
  piece->elsewhere = nullptr;
  return absl::OkStatus();
}

// As TakeCopy, of masters in two halves: a piece is what they are together.
absl::Status TakeJoined(const FlatParameter& flat, SavedPiece* piece) {
  piece->format = flat.states().value_dtype();
  piece->elements = at::empty({piece->part.numel()}, piece->format.dtype);
  piece->own = true;
  return flat.states().JoinTo(piece->part, piece->elements);
}

// Adds elements of one state of a slot; of `piece` its place is set.
absl::Status AddPiece(const TrainingState& state, const StateTable& table,
                      const StateTable::Slot& slot, StateTable::State kind,
                      SavedPiece piece, CheckpointContent* content) {
  const FlatParameter& flat =
      *state.model.flats()[static_cast<size_t>(slot.flat)];
  const TieredBuffer& buffer = table.Buffer(slot.flat, kind);
  piece.format = buffer.format();
  if (table.IsSplit(slot.flat, kind)) {
    TESSERA_RETURN_IF_ERROR(TakeJoined(flat, &piece));
  } else if (buffer.elsewhere()) {
    piece.elsewhere = &buffer;
    // A program's write to it later ends the save before, by the stream.
    if (flat.options().stream == nullptr && kind == StateTable::kValue) {
      TESSERA_RETURN_IF_ERROR(TakeCopy(&piece));
    }
  } else {
    piece.elements = table.Elements(slot.flat, kind, piece.part);
  }
  // States of 8 bits are float32 in a checkpoint, so that it can be loaded
  // into states of any kind; what is encoded again has the same bytes.
  if (piece.format.in_blocks()) {
    piece.decode = [non_negative = table.non_negative(slot.flat, kind)](
                       const char* from, int64_t n, float* to) {
      DecodeBlock8(from, n, non_negative, to);
    };
  }
  // Masters may be what the program has in its hands; states are not.
  piece.lasts = kind != StateTable::kValue;
  content->pieces.push_back(std::move(piece));
  return absl::OkStatus();
}

absl::Status AddPieces(const TrainingState& state, const StateTable& table,
                       CheckpointContent* content) {
  for (size_t s = 0; s < table.slots().size(); ++s) {
    const StateTable::Slot& slot = table.slots()[s];
    const FlatParameter& flat =
        *state.model.flats()[static_cast<size_t>(slot.flat)];
    const std::optional<PartOfWhole>& of = table.PartOf(slot);
    const Range part = table.Part(slot, ShareOf(state, flat, of.has_value()));
    if (part.empty()) continue;
    const int64_t begin = flat.layout().slot(slot.slot).begin;
    const std::vector<PartRun> runs =
        RunsOf(of, {part.begin - begin, part.end - begin},
               NumbersPer(flat.ParameterOfSlot(slot.slot).tensor));
    int number = 0;
    for (StateTable::State kind = 0; kind < table.num_states(slot.flat);
         ++kind) {
      if (!table.Has(slot.flat, kind)) continue;
      for (const PartRun& run : runs) {
        SavedPiece piece;
        piece.storage = static_cast<int>(s);
        piece.state = number;
        piece.begin = run.whole;
        const int64_t at = begin - flat.owned().begin + run.part;
        piece.part = {at, at + run.numel};
        TESSERA_RETURN_IF_ERROR(
            AddPiece(state, table, slot, kind, std::move(piece), content));
      }
      ++number;
    }
  }
  return absl::OkStatus();
}

// Rank 0's are the checkpoint's, and a rank whose tensor differs keeps its own.
// What is the same on all is dealt out, each to whom has least of it.
absl::Status AddPlain(const TrainingState& state, const StateTable& table,
                      CheckpointContent* content) {
  std::vector<uint64_t> prints;
  std::vector<at::Tensor> numbers;
  for (const StateTable::Plain& plain : table.plain()) {
    numbers.push_back(NumbersOf(plain.tensor));
    const at::Tensor here = numbers.back().cpu();
    prints.push_back(Fingerprint(here.const_data_ptr(),
                                 static_cast<int64_t>(here.nbytes())));
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::vector<uint64_t>> all,
      AllGatherValues(state.comm(), prints, CommTag{"checkpoint buffers"}));
  const int first = static_cast<int>(table.slots().size());
  std::vector<size_t> bytes(all.size(), 0);  // that each writes
  for (size_t i = 0; i < numbers.size(); ++i) {
    const bool same = std::all_of(
        all.begin(), all.end(),
        [&](const std::vector<uint64_t>& one) { return one[i] == all[0][i]; });
    const auto writer =
        same ? std::min_element(bytes.begin(), bytes.end()) : bytes.begin();
    *writer += numbers[i].nbytes();
    if (writer - bytes.begin() == state.comm()->rank()) {
      if (numbers[i].numel() == 0) continue;
      content->pieces.push_back(
          {first + static_cast<int>(i), 0, 0, numbers[i]});
    } else if (all[0][i] != prints[i]) {
      content->values.emplace_back(
          absl::StrCat(kOwnTensor, table.NamesOf(table.plain()[i].tensor)[0]),
          BytesOf(numbers[i]));
    }
  }
  return absl::OkStatus();
}

// Adds the shaped states, which are identical on all ranks: the ranks take
// turns.
void AddShaped(const TrainingState& state, const StateTable& table,
               CheckpointContent* content) {
  int number = static_cast<int>(table.slots().size() + table.plain().size());
  for (const StateTable::Shaped& shaped : table.shaped()) {
    const at::Tensor values = table.ValuesOf(shaped);
    if (!values.defined()) continue;
    const int storage = number++;
    const bool mine =
        storage % state.comm()->world_size() == state.comm()->rank();
    if (!mine || values.numel() == 0) continue;
    SavedPiece piece;
    piece.storage = storage;
    piece.state = 0;
    piece.begin = 0;
    piece.elements = values.view({-1});
    piece.lasts = true;
    content->pieces.push_back(std::move(piece));
  }
}

// Describes the options that are not as configured.
void DescribeOptions(const TrainingState& state,
                     proto::CheckpointTraining* training) {
  for (size_t g = 0; g < state.groups.groups().options.size(); ++g) {
    const OptimizerOptions& set = state.groups.groups().options[g];
    const OptimizerOptions& configured = state.groups.configured()[g];
    for (const std::string& name : OptionNames(set.algorithm)) {
      const double value = *OptionOf(name, set);
      if (value == *OptionOf(name, configured)) continue;
      proto::CheckpointOption* const option = training->add_options();
      option->set_group(state.groups.groups().names[g]);
      option->set_name(name);
      option->set_value(value);
    }
  }
}

void DescribeAverages(const TrainingState& state,
                      proto::CheckpointTraining* training) {
  for (size_t g = 0; g < state.groups.groups().options.size(); ++g) {
    if (!RowOf(state.groups.groups().options[g].algorithm).averages) continue;
    const AverageWeights& weights = state.optimizer()->counts().weights()[g];
    proto::CheckpointAverage* const average = training->add_averages();
    average->set_group(state.groups.groups().names[g]);
    average->set_steps(weights.steps);
    average->set_sum(weights.sum);
    average->set_largest_rate(weights.largest_rate);
  }
}

void DescribeTraining(const TrainingState& state,
                      proto::CheckpointTraining* training) {
  training->set_world_size(state.comm()->world_size());
  training->set_stage(state.model.stage());
  if (state.model.has_cuts()) {
    training->set_tensor_ranks(state.model.mesh().size(kTp));
  }
  if (state.model.has_sequences()) {
    training->set_sequence_ranks(state.model.mesh().size(kCp));
  }
  if (state.model.has_stages()) {
    training->set_pipeline_ranks(state.model.mesh().size(kPp));
  }
  training->set_config(ConfigToJson(state.config));
  training->set_libtorch(TORCH_VERSION);
  training->set_tessera(kTesseraVersion);
  if (state.model.device().is_cuda()) {
    training->set_cuda(
        absl::StrCat(at::detail::getCUDAHooks().versionCUDART()));
  }
  training->set_backend(std::string(state.comm()->backend()));
  if (state.optimizer() != nullptr) {
    training->set_optimizer(state.optimizer()->name());
    DescribeOptions(state, training);
    DescribeAverages(state, training);
  }
  if (state.groups.plateau() != nullptr) {
    const PlateauState& plateau = state.groups.plateau()->state();
    training->mutable_plateau()->set_best(plateau.best);
    training->mutable_plateau()->set_bad_reports(plateau.bad_reports);
    training->mutable_plateau()->set_cooldown_left(plateau.cooldown_left);
    training->mutable_plateau()->set_reductions(plateau.reductions);
  }
  if (state.scaler() != nullptr) {
    const LossScalerState scaler = state.scaler()->state();
    training->set_loss_scale(scaler.scale);
    training->set_clean_steps(scaler.clean_steps);
    training->set_hysteresis_left(scaler.hysteresis_left);
  }
  training->set_skipped_steps(state.place.skipped_steps);
  training->set_samples(state.place.samples);
  training->set_train_batch_size(state.config.train_batch_size());
  if (!state.manager_state.empty()) {
    training->set_manager_state(state.manager_state);
  }
}

// What no checkpoint can hold is not left out in silence.
absl::Status CheckCanBeHeld(const TrainingState& state,
                            const StateTable& table) {
  if (state.optimizer() != nullptr && state.optimizer()->is_custom() &&
      state.groups.groups().options[0].custom->keeps_states) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the optimizer '", state.groups.groups().options[0].custom->name,
        "' keeps states of its own, which a checkpoint cannot hold; say what "
        "they are (TorchStates of FromTorch), or save parameters alone "
        "(SaveSafetensors)"));
  }
  for (const StateTable::Plain& plain : table.plain()) {
    const at::Tensor& t = plain.tensor;
    if (t.layout() == at::kStrided &&
        (t.is_complex() || !CheckpointDtype(t.scalar_type()).empty())) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "'", table.NamesOf(t)[0], "' is ", t.toString(),
        ", which a checkpoint cannot hold; make it a plain tensor, or keep it "
        "out of the module's buffers"));
  }
  return absl::OkStatus();
}

}  // namespace

// A stage steps its own parameters alone.
static absl::Status SyncCounts(const TrainingState& state) {
  if (!state.model.has_stages() || state.optimizer() == nullptr) {
    return absl::OkStatus();
  }
  std::vector<int64_t>& steps = state.optimizer()->counts().steps();
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::vector<int64_t>> all,
                           AllGatherValues(state.model.pipeline().get(), steps,
                                           CommTag{"steps of parameters"}));
  for (const std::vector<int64_t>& one : all) {
    for (size_t i = 0; i < steps.size(); ++i) {
      steps[i] = std::max(steps[i], one[i]);
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointContent> ContentOf(const TrainingState& state,
                                            absl::string_view client_state) {
  TorchScope scope;
  const StateTable table(state.model.flats(), state.optimizer(),
                         state.model.module());
  TESSERA_RETURN_IF_ERROR(
      state.comm()->AgreeOk(CheckCanBeHeld(state, table), "saving"));
  TESSERA_RETURN_IF_ERROR(SyncCounts(state));
  CheckpointContent content;
  content.head.set_step(state.place.step);
  table.Describe(&content.head);
  DescribeTraining(state, content.head.mutable_training());
  // Rank 0's counts, and numbers of others' pieces are of theirs.
  TESSERA_RETURN_IF_ERROR(state.comm()->AgreeEqual(
      absl::StrCat("fingerprint ",
                   absl::Hex(Crc32c(content.head.SerializeAsString()))),
      "list of what a checkpoint is to hold"));
  TESSERA_RETURN_IF_ERROR(AddPieces(state, table, &content));
  TESSERA_RETURN_IF_ERROR(AddPlain(state, table, &content));
  AddShaped(state, table, &content);
  for (const NamedGenerator& one : GeneratorsOf(state.model.device())) {
    content.values.emplace_back(one.name, BytesOf(one.generator.get_state()));
  }
  content.values.emplace_back(kClientState, client_state);
  return content;
}

}  // namespace tessera
