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

struct Chosen {
  int flats = 0;
  int64_t numel = 0;  // on a rank
};

class Chooser {
 public:
  Chooser(const OffloadOptions& options, absl::Span<const FlatPlan> flats,
          int shard_group_size, std::vector<FlatParameterOptions>* flat_options)
      : options_(options), flats_(flats), flat_options_(*flat_options) {
    for (const FlatPlan& flat : flats) {
      numels_.push_back(
          LayoutOf(flat.parameters, shard_group_size).shard_numel());
      total_numel_ += numels_.back();
      item_bytes_ = std::max(item_bytes_, StateItemBytes(flat));
    }
  }
  int64_t total_numel() const { return total_numel_; }
  int64_t item_bytes() const { return item_bytes_; }

  // From the end, `wanted` elements at most, of units that are large enough.
  template <typename ItemBytes>
  Chosen Choose(double wanted, const ItemBytes& item_bytes,
                bool FlatParameterOptions::* set) {
    Chosen chosen;
    double passed = 0;
    for (size_t i = flats_.size(); i-- > 0;) {
      passed += static_cast<double>(numels_[i]);
      if (!flat_options_[i].stage.sharded_parameters || passed > wanted ||
          numels_[i] * item_bytes(flats_[i]) < options_.min_state_bytes) {
        continue;
      }
      flat_options_[i].*set = true;
      ++chosen.flats;
      chosen.numel += numels_[i];
    }
    return chosen;
  }

 private:
  const OffloadOptions& options_;
  const absl::Span<const FlatPlan> flats_;
  std::vector<FlatParameterOptions>& flat_options_;
  std::vector<int64_t> numels_;
  int64_t total_numel_ = 0;
  int64_t item_bytes_ = 4;
};

absl::Status CheckOnCpu(const char* key, absl::Span<const FlatPlan> flats) {
  for (const FlatPlan& flat : flats) {
    const at::Device device = flat.parameters[0].tensor.device();
    if (device.is_cpu()) continue;
    return absl::UnimplementedError(absl::StrCat(
        key, ".device: expected none for a module on ", device.str(),
        ", got nvme: not available in this version; leave the section out, or "
        "train on the CPU"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<UpdateStream>> Open(
    const OffloadOptions& options, int64_t item_bytes, int rank) {
  SwapOptions swap = options.swap;
  swap.owner = absl::StrCat("rank ", rank);
  std::error_code error;  // that it is not there is Create's to say
  std::filesystem::create_directories(swap.folder, error);
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<SwapFile> file,
                           SwapFile::Create(swap));
  UpdateStreamOptions stream = options.stream;
  stream.item_bytes = item_bytes;
  stream.most_states = options.parameters ? 4 : 3;
  TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<UpdateStream> made,
                           UpdateStream::Create(std::move(file), stream));
  return std::shared_ptr<UpdateStream>(std::move(made));
}

std::string TextOf(const char* what, const Chosen& chosen, size_t flats,
                   int64_t total_numel) {
  return absl::StrFormat("%s of %d of %d units, %.1f %% of the elements", what,
                         chosen.flats, flats,
                         100.0 * static_cast<double>(chosen.numel) /
                             static_cast<double>(total_numel));
}

}  // namespace

absl::StatusOr<std::shared_ptr<UpdateStream>> PutOnDisk(
    const OffloadOptions& options, absl::Span<const FlatPlan> flats,
    int shard_group_size, Communicator* comm,
    std::vector<FlatParameterOptions>* flat_options) {
  if (!options.states && !options.parameters) return nullptr;
  const char* const key = options.states ? kStatesKey : kParametersKey;
  TESSERA_RETURN_IF_ERROR(CheckOnCpu(key, flats));
  Chooser chooser(options, flats, shard_group_size, flat_options);
  const auto total = static_cast<double>(chooser.total_numel());
  const Chosen states = chooser.Choose(options.states ? options.ratio * total : 0,
                                       StateItemBytes,
                                       &FlatParameterOptions::states_on_disk);
  const Chosen parameters = chooser.Choose(
      options.parameters ? total - static_cast<double>(options.max_in_memory)
                         : 0,
      [](const FlatPlan& flat) {
        return BytesOf(ElementType(flat.working_dtype));
      },
      &FlatParameterOptions::parameters_on_disk);
  if (options.parameters && parameters.flats == 0) {
    TESSERA_LOG_RANK0(INFO)
        << kParametersKey << ": all parameters stay in memory: max_in_cpu is "
        << options.max_in_memory << ", and a rank has "
        << chooser.total_numel();
  }
  if (options.states && states.flats == 0) {
    TESSERA_LOG_RANK0(INFO) << kStatesKey
                            << ": all states stay in memory: no unit is large "
                               "enough, or within the ratio";
  }
  if (states.flats + parameters.flats == 0) return nullptr;
  auto stream = Open(options, chooser.item_bytes(), comm->rank());
  const absl::Status opened =
      Annotate(stream.status(), absl::StrCat(key, ".nvme_path"));
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(opened, "Engine::Create"));
  for (FlatParameterOptions& flat : *flat_options) {
    if (flat.states_on_disk || flat.parameters_on_disk) flat.stream = *stream;
  }
  TESSERA_LOG_RANK0(INFO) << absl::StrFormat(
      "offload to nvme: %s; %s (%s, %s); %d buffers, %.1f MB",
      TextOf("optimizer states", states, flats.size(), chooser.total_numel()),
      TextOf("parameters", parameters, flats.size(), chooser.total_numel()),
      options.swap.folder, (*stream)->disk()->Describe(),
      options.stream.buffers,
      static_cast<double>((*stream)->resident_bytes()) / 1e6);
  return std::move(*stream);
}

}  // namespace tessera
