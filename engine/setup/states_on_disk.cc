#include "engine/setup/states_on_disk.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/log.h"
#include "base/status.h"
#include "sharding/layout/flat_buffer.h"

namespace tessera {
namespace {

constexpr char kStatesKey[] = "zero_optimization.offload_optimizer";
constexpr char kParametersKey[] = "zero_optimization.offload_param";

int64_t BytesOf(at::ScalarType dtype) {
  return static_cast<int64_t>(c10::elementSize(dtype));
}

int64_t StateItemBytes(const FlatPlan& flat) {
  const at::ScalarType own = ElementType(flat.dtype);
  return BytesOf(at::isReducedFloatingType(own) ? at::kFloat : own);
}

absl::StatusOr<std::shared_ptr<UpdateStream>> Open(
    const OffloadOptions& options, const UpdateStreamOptions& stream,
    int rank) {
  SwapOptions swap = options.swap;
  swap.owner = absl::StrCat("rank ", rank);
  std::error_code error;  // that it is not there is Create's to say
  std::filesystem::create_directories(swap.folder, error);
  auto file = SwapFile::Create(swap);
  TESSERA_RETURN_IF_ERROR(Annotate(
      file.status(), absl::StrCat(options.states ? kStatesKey : kParametersKey,
                                  ".nvme_path")));
  auto made = UpdateStream::Create(*std::move(file), stream);
  TESSERA_RETURN_IF_ERROR(Annotate(
      made.status(),
      absl::StrCat(kStatesKey, ".buffer_count ", stream.buffers,
                   ", of sharding.offload.slice_numel ", stream.slice_numel)));
  return std::shared_ptr<UpdateStream>(*std::move(made));
}

std::string TextOf(const char* what, const OnDisk& chosen, size_t units,
                   int64_t total_numel) {
  return absl::StrFormat("%s of %d of %d units, %.1f %% of the elements", what,
                         chosen.units, units,
                         100.0 * static_cast<double>(chosen.numel) /
                             static_cast<double>(total_numel));
}

void TellWhatStays(const OffloadOptions& options, const DiskChoice& choice) {
  if (options.parameters && choice.parameters.units == 0) {
    TESSERA_LOG_RANK0(INFO)
        << kParametersKey << ": all parameters stay in memory: max_in_cpu is "
        << options.max_in_memory << " elements, and a rank has "
        << choice.total_numel;
  }
  if (options.states && choice.states.units == 0) {
    TESSERA_LOG_RANK0(INFO) << kStatesKey
                            << ": all states stay in memory: no unit is large "
                               "enough, or within the ratio";
  }
}

}  // namespace

DiskChoice ChooseOnDisk(const OffloadOptions& options,
                        absl::Span<const FlatPlan> flats, int shard_group_size,
                        std::vector<FlatParameterOptions>* flat_options) {
  DiskChoice choice;
  choice.stream = options.stream;
  std::vector<int64_t> numels;
  for (const FlatPlan& flat : flats) {
    numels.push_back(LayoutOf(flat.parameters, shard_group_size).shard_numel());
    choice.total_numel += numels.back();
    choice.stream.item_bytes =
        std::max(choice.stream.item_bytes, StateItemBytes(flat));
  }
  const auto total = static_cast<double>(choice.total_numel);
  const double states = options.states ? options.ratio * total : 0;
  const double parameters =
      options.parameters ? total - static_cast<double>(options.max_in_memory)
                         : 0;
  double passed = 0;   // this one, and all behind it
  int two_copies = 0;  // 1: of some unit masters and parameters stream
  for (size_t i = flats.size(); i-- > 0;) {
    FlatParameterOptions& flat = (*flat_options)[i];
    passed += static_cast<double>(numels[i]);
    if (!flat.stage.sharded_parameters) continue;
    const auto take = [&](double wanted, int64_t item_bytes, OnDisk* chosen) {
      if (passed > wanted || numels[i] * item_bytes < options.min_state_bytes) {
        return false;
      }
      ++chosen->units;
      chosen->numel += numels[i];
      return true;
    };
    flat.states_on_disk =
        take(states, StateItemBytes(flats[i]), &choice.states);
    flat.gradients_on_disk = options.gradients && flat.states_on_disk;
    flat.parameters_on_disk =
        take(parameters, BytesOf(ElementType(flats[i].working_dtype)),
             &choice.parameters);
    const bool separate = flats[i].working_dtype != flats[i].dtype ||
                          at::isReducedFloatingType(flats[i].working_dtype);
    if (flat.parameters_on_disk && separate) two_copies = 1;
  }
  choice.stream.most_states = 3 + two_copies + (options.gradients ? 1 : 0);
  return choice;
}

absl::StatusOr<std::shared_ptr<UpdateStream>> PutOnDisk(
    const OffloadOptions& options, absl::Span<const FlatPlan> flats,
    int shard_group_size, Communicator* comm,
    std::vector<FlatParameterOptions>* flat_options) {
  if (!options.states && !options.parameters) return nullptr;
  const DiskChoice choice =
      ChooseOnDisk(options, flats, shard_group_size, flat_options);
  TellWhatStays(options, choice);
  if (!choice.any()) return nullptr;
  auto stream = Open(options, choice.stream, comm->rank());
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(stream.status(), "Engine::Create"));
  for (FlatParameterOptions& flat : *flat_options) {
    if (flat.states_on_disk || flat.parameters_on_disk) flat.stream = *stream;
  }
  TESSERA_LOG_RANK0(INFO) << absl::StrFormat(
      "offload to nvme: %s; %s (%s, %s); %d buffers, %.1f MB",
      TextOf("optimizer states", choice.states, flats.size(),
             choice.total_numel),
      TextOf("parameters", choice.parameters, flats.size(), choice.total_numel),
      options.swap.folder, (*stream)->disk()->Describe(),
      options.stream.buffers,
      static_cast<double>((*stream)->resident_bytes()) / 1e6);
  return std::move(*stream);
}

bool AnyParametersOnDisk(const std::vector<FlatParameterOptions>& options) {
  return std::any_of(
      options.begin(), options.end(),
      [](const FlatParameterOptions& each) { return each.parameters_on_disk; });
}

absl::Status WithParametersOnDisk(absl::string_view key) {
  return absl::InvalidArgumentError(absl::StrCat(
      key, ": expected auto or off, got on: ", kParametersKey,
      " puts parameters on nvme, where each rank has its own; leave one of the "
      "two out"));
}

absl::Status CheckOnCpu(absl::string_view key,
                        absl::Span<const at::Tensor> parameters) {
  for (const at::Tensor& p : parameters) {
    if (!p.defined() || p.device().is_cpu()) continue;
    return absl::UnimplementedError(absl::StrCat(
        key, ".device: expected none for a module on ", p.device().str(),
        ", got cpu or nvme: not available in this version; leave the section "
        "out, or train on the CPU"));
  }
  return absl::OkStatus();
}

}  // namespace tessera
