#include "engine/access/training_state.h"

#include <utility>

#include "ATen/CPUGeneratorImpl.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/bits.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "checkpoint/checkpoint.h"
#include "engine/setup/initial_sync.h"
#include "sharding/torch/torch_scope.h"

namespace tessera {
namespace {

at::Tensor BytesOver(char* data, int64_t bytes, at::Device device) {
  return TensorOver(data, {bytes}, {1}, at::kByte, device);
}

// What is saved and loaded in place.
std::vector<CheckpointPart> PartsOf(const TrainingState& state) {
  std::vector<CheckpointPart> parts;
  for (size_t u = 0; u < state.flats.size(); ++u) {
    FlatParameter& flat = *state.flats[u];
    auto add = [&](absl::string_view what, const at::Tensor& values) {
      // Names of units need not differ, their numbers do.
      parts.push_back(
          {absl::StrCat(what, "/", u, "/", flat.name()),
           BytesOver(static_cast<char*>(values.data_ptr()),
                     static_cast<int64_t>(values.nbytes()), flat.device())});
    };
    add("parameters", flat.masters());
    if (state.optimizer == nullptr) continue;
    const int i = static_cast<int>(u);
    if (!state.optimizer->exp_avg(i).defined()) continue;
    add("exp_avg", state.optimizer->exp_avg(i).View());
    add("exp_avg_sq", state.optimizer->exp_avg_sq(i).View());
  }
  if (state.optimizer != nullptr) {
    auto& steps = state.optimizer->parameter_steps();
    parts.push_back(
        {"parameter_steps",
         BytesOver(reinterpret_cast<char*>(steps.data()),
                   static_cast<int64_t>(steps.size() * sizeof(int64_t)),
                   at::kCPU)});
  }
  return parts;
}

// The rank whose file has this rank's part of the state: the first that holds
// it.
int StateRank(const TrainingState& state) {
  return state.comm->rank() % state.shard_group_size;
}

// Which flats have optimizer states; what comes after depends on it.
CheckpointPart HasStatePart(std::vector<uint8_t>* has_state) {
  return {"has_state",
          BytesOver(reinterpret_cast<char*>(has_state->data()),
                    static_cast<int64_t>(has_state->size()), at::kCPU)};
}

CheckpointPart ScalerPart(LossScalerState* scaler) {
  return {"loss_scaler", BytesOver(reinterpret_cast<char*>(scaler),
                                   sizeof(LossScalerState), at::kCPU)};
}

proto::CheckpointManifest ManifestHead(const TrainingState& state) {
  std::string model;
  int num_parameters = 0;
  for (const auto& flat : state.flats) {
    for (const auto& p : flat->parameters()) {
      absl::StrAppend(&model, flat->name(), "|", p.name, "|", p.range.begin,
                      "|", p.range.end, "|", p.slot, "|", GeometryOf(p.tensor),
                      ";");
      ++num_parameters;
    }
    absl::StrAppend(&model, static_cast<int>(flat->master_dtype()), ";");
  }
  absl::StrAppend(&model, state.optimizer == nullptr ? "none" : "adamw",
                  state.scaler == nullptr ? "" : " scaled");
  proto::CheckpointManifest head;
  head.set_world_size(state.comm->world_size());
  head.set_shard_group_size(state.shard_group_size);
  head.set_stage(state.stage);
  head.set_step(state.step);
  head.set_model(absl::StrFormat(
      "%d parameters in %d units, fingerprint %016x", num_parameters,
      static_cast<int>(state.flats.size()),
      Fingerprint(model.data(), static_cast<int64_t>(model.size()))));
  return head;
}

}  // namespace

absl::Status SaveState(const std::string& dir, const TrainingState& state,
                       absl::string_view client_state) {
  TorchScope scope;
  std::vector<CheckpointPart> parts;
  std::vector<uint8_t> has_state;
  LossScalerState scaler;
  if (StateRank(state) == state.comm->rank()) {
    parts = PartsOf(state);
    if (state.optimizer != nullptr) has_state = state.optimizer->has_state();
    parts.push_back(HasStatePart(&has_state));
    if (state.scaler != nullptr) scaler = state.scaler->state();
    parts.push_back(ScalerPart(&scaler));
  }
  parts.push_back({"rng", at::detail::getDefaultCPUGenerator().get_state()});
  std::string client(client_state);
  parts.push_back({"client_state",
                   BytesOver(client.data(), static_cast<int64_t>(client.size()),
                             at::kCPU)});
  return WriteCheckpoint(dir, ManifestHead(state), parts, state.comm);
}

absl::StatusOr<LoadedState> LoadState(const std::string& dir,
                                      const TrainingState& state) {
  TorchScope scope;
  auto manifest = ReadManifest(dir, ManifestHead(state));
  absl::Status mine = manifest.status();
  if (mine.ok()) {
    mine = VerifyRankFile(dir, manifest->files(state.comm->rank()));
  }
  if (mine.ok() && StateRank(state) != state.comm->rank()) {
    mine = VerifyRankFile(dir, manifest->files(StateRank(state)));
  }
  TESSERA_RETURN_IF_ERROR(state.comm->AgreeOk(mine, "LoadCheckpoint"));
  TESSERA_RETURN_IF_ERROR(
      CheckSame(absl::StrFormat("%s, step %d, fingerprint %016x", dir,
                                manifest->step(), manifest->fingerprint()),
                "checkpoint", state.comm));
  const proto::CheckpointFile& file = manifest->files(StateRank(state));
  const proto::CheckpointFile& own = manifest->files(state.comm->rank());
  LoadedState loaded;
  loaded.step = manifest->step();
  mine = CatchTorch("LoadCheckpoint", [&]() -> absl::Status {
    if (state.optimizer != nullptr) {
      std::vector<uint8_t> has_state(state.flats.size());
      CheckpointPart part = HasStatePart(&has_state);
      TESSERA_RETURN_IF_ERROR(ReadPart(dir, file, &part));
      TESSERA_RETURN_IF_ERROR(state.optimizer->MatchStates(has_state));
    }
    return absl::OkStatus();
  });
  // Before any rank has changed its parameters.
  TESSERA_RETURN_IF_ERROR(state.comm->AgreeOk(mine, "LoadCheckpoint"));
  mine = CatchTorch("LoadCheckpoint", [&]() -> absl::Status {
    for (CheckpointPart& part : PartsOf(state)) {
      TESSERA_RETURN_IF_ERROR(ReadPart(dir, file, &part));
    }
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    CheckpointPart rng{"rng", generator.get_state()};
    TESSERA_RETURN_IF_ERROR(ReadPart(dir, own, &rng));
    LossScalerState scaler;
    CheckpointPart scaler_part = ScalerPart(&scaler);
    TESSERA_RETURN_IF_ERROR(ReadPart(dir, file, &scaler_part));
    if (state.scaler != nullptr) {
      TESSERA_RETURN_IF_ERROR(state.scaler->Restore(scaler));
    }
    generator.set_state(rng.bytes);
    TESSERA_ASSIGN_OR_RETURN(loaded.client_state,
                             ReadText(dir, own, "client_state"));
    return absl::OkStatus();
  });
  TESSERA_RETURN_IF_ERROR(state.comm->AgreeOk(mine, "LoadCheckpoint"));
  return loaded;
}

}  // namespace tessera
