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

constexpr char kKey[] = "zero_optimization.offload_optimizer";

int64_t StateItemBytes(const FlatPlan& flat) {
  const at::ScalarType own = ElementType(flat.dtype);
  return static_cast<int64_t>(
      c10::elementSize(at::isReducedFloatingType(own) ? at::kFloat : own));
}

struct Choice {
  std::vector<size_t> flats;
  int64_t numel = 0;        // of them, on a rank
  int64_t total_numel = 0;  // of all
  int64_t item_bytes = 4;   // of the largest
};

Choice Choose(const OffloadOptions& options, absl::Span<const FlatPlan> flats,
              int shard_group_size,
              const std::vector<FlatParameterOptions>& flat_options) {
  Choice choice;
  std::vector<int64_t> numels;
  for (const FlatPlan& flat : flats) {
    numels.push_back(LayoutOf(flat.parameters, shard_group_size).shard_numel());
    choice.total_numel += numels.back();
  }
  const double wanted = options.ratio * static_cast<double>(choice.total_numel);
  double passed = 0;  // those before the chosen ones, from the end
  for (size_t i = flats.size(); i-- > 0;) {
    passed += static_cast<double>(numels[i]);
    const int64_t item = StateItemBytes(flats[i]);
    if (!flat_options[i].stage.sharded_parameters ||
        numels[i] * item < options.min_state_bytes || passed > wanted) {
      continue;
    }
    choice.flats.push_back(i);
    choice.numel += numels[i];
    choice.item_bytes = std::max(choice.item_bytes, item);
  }
  return choice;
}

absl::StatusOr<std::shared_ptr<UpdateStream>> Open(
    const OffloadOptions& options, const Choice& choice, int rank) {
  SwapOptions swap = options.swap;
  swap.owner = absl::StrCat("rank ", rank);
  std::error_code error;  // that it is not there is Create's to say
  std::filesystem::create_directories(swap.folder, error);
  TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<SwapFile> file,
                           SwapFile::Create(swap));
  UpdateStreamOptions stream = options.stream;
  stream.item_bytes = choice.item_bytes;
  TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<UpdateStream> made,
                           UpdateStream::Create(std::move(file), stream));
  return std::shared_ptr<UpdateStream>(std::move(made));
}

}  // namespace

absl::StatusOr<std::shared_ptr<UpdateStream>> PutStatesOnDisk(
    const OffloadOptions& options, absl::Span<const FlatPlan> flats,
    int shard_group_size, Communicator* comm,
    std::vector<FlatParameterOptions>* flat_options) {
  if (!options.states) return nullptr;
  for (const FlatPlan& flat : flats) {
    const at::Device device = flat.parameters[0].tensor.device();
    if (device.is_cpu()) continue;
    return absl::UnimplementedError(absl::StrCat(
        kKey, ".device: expected none for a module on ", device.str(),
        ", got nvme: not available in this version; leave the section out, or "
        "train on the CPU"));
  }
  const Choice choice = Choose(options, flats, shard_group_size, *flat_options);
  if (choice.flats.empty()) {
    TESSERA_LOG_RANK0(INFO)
        << kKey << ": no unit is large enough, or within the ratio: all states "
        << "stay in memory";
    return nullptr;
  }
  auto stream = Open(options, choice, comm->rank());
  const absl::Status opened =
      Annotate(stream.status(), absl::StrCat(kKey, ".nvme_path"));
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(opened, "Engine::Create"));
  for (const size_t i : choice.flats) {
    (*flat_options)[i].states_stream = *stream;
  }
  TESSERA_LOG_RANK0(INFO) << absl::StrFormat(
      "%s: states of %d of %d units, %.1f %% of the elements, are on nvme (%s, "
      "%s); %d buffers of %.1f MB",
      kKey, choice.flats.size(), flats.size(),
      100.0 * static_cast<double>(choice.numel) /
          static_cast<double>(choice.total_numel),
      options.swap.folder, (*stream)->disk()->Describe(),
      options.stream.buffers,
      static_cast<double>((*stream)->resident_bytes()) / 1e6 /
          options.stream.buffers);
  return std::move(*stream);
}

}  // namespace tessera
