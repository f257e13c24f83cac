#include "engine/build/tiers.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/layout/flat_buffer.h"
#include "base/log.h"
#include "base/status.h"

namespace tessera {
namespace {

constexpr char kStatesKey[] = "zero_optimization.offload_optimizer";
constexpr char kParametersKey[] = "zero_optimization.offload_param";

int64_t BytesOf(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

int64_t StateItemBytes(const FlatPlan& flat) {
  return BytesOf(StepDtypeOf(ElementType(flat.dtype)));
}

absl::StatusOr<std::shared_ptr<UpdateStream>> MakeStream(
    const OffloadOptions& options, const TierChoice& choice, int rank) {
  std::shared_ptr<SwapFile> disk;
  if (choice.on_disk) {
    const char* const section =
        options.states == Tier::kDisk ? kStatesKey : kParametersKey;
    TESSERA_ASSIGN_OR_RETURN(
        disk,
        OpenSwapFile(options.swap, rank, absl::StrCat(section, ".nvme_path")));
  }
  auto made = UpdateStream::Create(std::move(disk), choice.stream);
  TESSERA_RETURN_IF_ERROR(Annotate(
      made.status(),
      absl::StrCat(kStatesKey, ".buffer_count: ", choice.stream.buffers,
                   " slices of sharding.offload.slice_numel ",
                   choice.stream.slice_numel)));
  return std::shared_ptr<UpdateStream>(*std::move(made));
}

std::string TextOf(const char* what, const Offloaded& chosen, size_t units,
                   int64_t total_numel) {
  return absl::StrFormat("%s of %d of %d units, %.1f %% of the elements", what,
                         chosen.units, units,
                         100.0 * static_cast<double>(chosen.numel) /
                             static_cast<double>(total_numel));
}

// Logs what stays in memory. engine/engine_stage.cc has already said that the
// host means nothing for a module on the CPU.
void TellWhatStays(const OffloadOptions& options, const TierChoice& choice,
                   bool on_cpu) {
  if (options.parameters == Tier::kDisk && choice.parameters.units == 0) {
    TESSERA_LOG_RANK0(INFO)
        << kParametersKey << ": all parameters stay in memory: max_in_cpu is "
        << options.max_in_memory << " elements, and a rank has "
        << choice.total_numel;
  }
  const bool said = on_cpu && options.states == Tier::kHost;
  if (options.states != Tier::kMemory && !said && choice.states.units == 0) {
    TESSERA_LOG_RANK0(INFO)
        << kStatesKey
        << ": all states stay where their units are: none is sharded and large "
           "enough, or within the ratio";
  }
}

// Returns the tier of states or parameters that are `sharded` or not: kMemory
// where `wanted` is not for such a unit. Below stage 3 nvme counts as cpu
// (config/validate_sharding.cc).
Tier TierFor(Tier wanted, bool on_cpu, Stage stage, bool sharded) {
  if (wanted == Tier::kDisk && stage.sharded_parameters) return wanted;
  return wanted != Tier::kMemory && sharded && !on_cpu ? Tier::kHost
                                                       : Tier::kMemory;
}

// Gradients of a device are on the host, where they are needed.
Tier TierOfGradients(const OffloadOptions& options, bool on_cpu,
                     const FlatParameterOptions& chosen) {
  if (chosen.states_tier == Tier::kMemory || !chosen.stage.sharded_gradients) {
    return Tier::kMemory;
  }
  if (!on_cpu) return Tier::kHost;
  return options.gradients ? chosen.states_tier : Tier::kMemory;
}

// Counts a unit's states on the disk, which a step streams
// (offload/shard_states.h).
int StatesOnDisk(const FlatParameterOptions& flat, bool separate_masters,
                 int optimizer_states) {
  const auto on_disk = [](Tier tier) { return tier == Tier::kDisk ? 1 : 0; };
  return (optimizer_states + (separate_masters ? 1 : 0)) *
             on_disk(flat.states_tier) +
         on_disk(flat.parameters_tier) + on_disk(flat.gradients_tier);
}

}  // namespace

bool HasSeparateMasters(const FlatPlan& flat,
                        const FlatParameterOptions& options, bool on_cpu) {
  return MasterDtypeOf(ElementType(flat.dtype), options) !=
             WorkingDtypeOf(flat.parameters, options) ||
         (!on_cpu && options.states_tier != Tier::kMemory &&
          options.parameters_tier == Tier::kMemory);
}

absl::StatusOr<std::shared_ptr<SwapFile>> OpenSwapFile(SwapOptions swap,
                                                       int rank,
                                                       absl::string_view key) {
  swap.owner = absl::StrCat("rank ", rank);
  std::error_code error;  // that it is not there is Create's to say
  std::filesystem::create_directories(swap.folder, error);
  auto file = SwapFile::Create(swap);
  TESSERA_RETURN_IF_ERROR(Annotate(file.status(), key));
  return std::shared_ptr<SwapFile>(*std::move(file));
}

TierChoice ChooseTiers(const OffloadOptions& options,
                       absl::Span<const FlatPlan> flats, int group_size,
                       bool on_cpu,
                       std::vector<FlatParameterOptions>* flat_options) {
  TierChoice choice;
  choice.stream = options.stream;
  if (!on_cpu) choice.stream.threads = options.step_cores;
  std::vector<int64_t> numels;
  for (const FlatPlan& flat : flats) {
    numels.push_back(LayoutOf(flat.parameters, group_size).shard_numel());
    choice.total_numel += numels.back();
    choice.stream.item_bytes =
        std::max(choice.stream.item_bytes, StateItemBytes(flat));
  }
  const auto total = static_cast<double>(choice.total_numel);
  const double states = options.ratio * total;
  const double parameters =
      options.parameters == Tier::kDisk
          ? total - static_cast<double>(options.max_in_memory)
          : total;
  double passed = 0;  // this one, and all behind it
  int most_states = 0;
  for (size_t i = flats.size(); i-- > 0;) {
    FlatParameterOptions& flat = (*flat_options)[i];
    passed += static_cast<double>(numels[i]);
    const auto take = [&](Tier tier, double wanted, int64_t item_bytes,
                          Offloaded* chosen) {
      if (tier == Tier::kMemory || passed > wanted ||
          numels[i] * item_bytes < options.min_state_bytes) {
        return Tier::kMemory;
      }
      ++chosen->units;
      chosen->numel += numels[i];
      choice.on_disk |= tier == Tier::kDisk;
      return tier;
    };
    flat.states_tier = take(TierFor(options.states, on_cpu, flat.stage,
                                    flat.stage.sharded_optimizer),
                            states, StateItemBytes(flats[i]), &choice.states);
    flat.gradients_tier = TierOfGradients(options, on_cpu, flat);
    flat.parameters_tier =
        take(TierFor(options.parameters, on_cpu, flat.stage,
                     flat.stage.sharded_parameters),
             parameters, BytesOf(ElementType(flats[i].working_dtype)),
             &choice.parameters);
    if (flat.parameters_tier == Tier::kMemory &&
        options.parameters == Tier::kDisk) {
      flat.parameters_tier =
          take(TierFor(Tier::kHost, on_cpu, flat.stage,
                       flat.stage.sharded_parameters),
               total, BytesOf(ElementType(flats[i].working_dtype)),
               &choice.parameters);
    }
    most_states =
        std::max(most_states,
                 StatesOnDisk(flat, HasSeparateMasters(flats[i], flat, on_cpu),
                              options.optimizer_states));
    if (flat.states_tier == Tier::kDisk &&
        flat.parameters_tier == Tier::kMemory) {
      choice.early_bytes +=
          numels[i] * BytesOf(ElementType(flats[i].working_dtype));
    }
  }
  choice.early_bytes = std::min(choice.early_bytes,
                                options.early_step ? options.early_bytes : 0);
  choice.stream.most_states =
      choice.on_disk && options.updates ? most_states : 0;
  return choice;
}

absl::StatusOr<std::shared_ptr<UpdateStream>> PutInTiers(
    const OffloadOptions& options, absl::Span<const FlatPlan> flats,
    int group_size, Communicator* comm,
    std::vector<FlatParameterOptions>* flat_options) {
  const bool on_cpu = flats[0].parameters[0].tensor.device().is_cpu();
  const TierChoice choice =
      ChooseTiers(options, flats, group_size, on_cpu, flat_options);
  TellWhatStays(options, choice, on_cpu);
  if (!choice.any()) return nullptr;
  auto stream = MakeStream(options, choice, comm->rank());
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(stream.status(), "Engine::Create"));
  for (FlatParameterOptions& flat : *flat_options) {
    if (flat.states_tier != Tier::kMemory ||
        flat.parameters_tier != Tier::kMemory) {
      flat.stream = *stream;
    }
  }
  const std::string what =
      absl::StrCat(TextOf("optimizer states", choice.states, flats.size(),
                          choice.total_numel),
                   "; ",
                   TextOf("parameters", choice.parameters, flats.size(),
                          choice.total_numel));
  if (!choice.on_disk) {
    TESSERA_LOG_RANK0(INFO) << "offload to cpu: " << what;
    return std::move(*stream);
  }
  TESSERA_LOG_RANK0(INFO) << absl::StrFormat(
      "offload to nvme: %s (%s, %s); %d slices, %.1f MB", what,
      options.swap.folder, (*stream)->disk()->Describe(),
      options.stream.buffers,
      static_cast<double>((*stream)->resident_bytes()) / 1e6);
  return std::move(*stream);
}

absl::StatusOr<std::shared_ptr<ActivationStore>> MakeActivationStore(
    const ActivationOffload& options, const std::vector<at::Tensor>& buffers,
    at::Device device, int rank) {
  constexpr char kKey[] = "activation_checkpointing.offload";
  if (options.tier == Tier::kMemory) return nullptr;
  if (options.tier == Tier::kHost && device.is_cpu()) {
    TESSERA_LOG_RANK0(INFO)
        << kKey << " \"cpu\": nothing changes, a module on the CPU has its "
        << "activations there";
    return nullptr;
  }
  std::shared_ptr<SwapFile> disk;
  if (options.tier == Tier::kDisk) {
    if (!device.is_cpu()) {
      return absl::UnimplementedError(absl::StrCat(
          kKey, ": expected \"cpu\" for a module on a device, got \"nvme\""));
    }
    TESSERA_ASSIGN_OR_RETURN(
        disk,
        OpenSwapFile(options.swap, rank, "activation_checkpointing.nvme_path"));
  }
  auto store = ActivationStore::Create(std::move(disk), options.least_bytes);
  for (const at::Tensor& buffer : buffers) {
    if (buffer.defined() && buffer.has_storage()) {
      store->Leave(buffer.storage());
    }
  }
  return store;
}

void NoteIfNoneMoves(const ActivationOffload& options) {
  if (options.tier == Tier::kMemory) return;
  TESSERA_LOG_RANK0(WARNING)
      << "activation_checkpointing.offload: nothing is moved, since no module "
      << "is named: set activation_checkpointing.units (\"auto\")";
}

bool AnyParametersElsewhere(const std::vector<FlatParameterOptions>& options) {
  return std::any_of(options.begin(), options.end(),
                     [](const FlatParameterOptions& each) {
                       return each.parameters_tier != Tier::kMemory;
                     });
}

absl::Status WithParametersElsewhere(absl::string_view key) {
  return absl::InvalidArgumentError(absl::StrCat(
      key, ": expected auto or off, got on: ", kParametersKey,
      " puts parameters where each rank has its own; leave one of the two "
      "out"));
}

}  // namespace tessera
