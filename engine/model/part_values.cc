#include "engine/model/part_values.h"

#include <algorithm>
#include <cstring>

#include "ATen/ops/cat.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"

namespace tessera {

absl::Status CheckWhole(const ShardedModel& model, absl::string_view call) {
  if (!model.has_parts()) return absl::OkStatus();
  const std::string axis =
      model.has_cuts()
          ? absl::StrCat("tensor_parallel.autotp_size ", model.mesh().size(kTp))
          : absl::StrCat("pipeline.stages ", model.mesh().size(kPp));
  return absl::UnimplementedError(
      absl::StrCat(call, " with ", axis,
                   ": not available in this version; Engine::FullStateDict and "
                   "Engine::Master give whole values"));
}

absl::Status CheckSameLoss(const ShardedModel& model, const at::Tensor& loss,
                           std::optional<double> weight) {
  if (!model.has_cuts() && !model.has_sequences()) return absl::OkStatus();
  const auto axis = model.has_cuts() ? kTp : kCp;
  Communicator& group = *model.mesh().group(axis);
  return CatchTorch("loss", [&]() -> absl::Status {
    TorchScope scope;
    const std::vector<double> mine = {loss.item().toDouble(),
                                      weight.value_or(-1)};
    const at::Tensor own = at::empty({2}, at::kDouble);
    std::copy(mine.begin(), mine.end(), own.mutable_data_ptr<double>());
    const int ranks = group.world_size();
    const at::Tensor all = at::empty({2 * ranks}, at::kDouble);
    TESSERA_RETURN_IF_ERROR(
        group.AllGather(own, all, {"loss of each part"}).Wait());
    const double* const values = all.const_data_ptr<double>();
    for (int rank = 1; rank < ranks; ++rank) {
      const double* const theirs = values + 2 * static_cast<ptrdiff_t>(rank);
      if (std::memcmp(values, theirs, 2 * sizeof(double)) == 0) continue;
      const std::vector<int> jobs = model.mesh().ranks(axis);
      const auto text = [](const double* of) {
        return of[1] < 0 ? absl::StrFormat("%.17g", of[0])
                         : absl::StrFormat("%.17g (weight %g)", of[0], of[1]);
      };
      return absl::InvalidArgumentError(absl::StrCat(
          "Backward: ranks ", jobs[0], " and ", jobs[static_cast<size_t>(rank)],
          ", of one ", axis == kTp ? "tensor" : "sequence",
          "-parallel group, have the losses ", text(values), " and ",
          text(theirs),
          ": they must read the same samples with the same weight "
          "(Engine::data_rank says whose) and draw the same random numbers "
          "(tessera::SeedAll)"));
    }
    return absl::OkStatus();
  });
}

void WarnIfWhole(const ShardedModel& model) {
  if (!model.has_sequences() || model.part_group()->collectives() > 0) return;
  TESSERA_LOG_RANK0(WARNING)
      << "sequence_parallel_size " << model.mesh().size(kCp)
      << ": the forward has used no part of a sequence, so each rank of a "
         "group computes all of it: call tessera::DivideSequence on the inputs "
         "(docs/guide.md)";
}

std::vector<int64_t> WholeSizes(const FlatParameter::Parameter& parameter) {
  return parameter.part.has_value() ? parameter.part->sizes
                                    : parameter.tensor.sizes().vec();
}

// Row-major on all ranks, whatever it is at home; undefined if it is so there.
static absl::StatusOr<at::Tensor> FromHome(const ShardedModel& model,
                                           const PartOfWhole& part,
                                           const at::Tensor& value) {
  Communicator& pipeline = *model.pipeline();
  constexpr int64_t kUndefined = -1;
  const at::Tensor head = at::full(
      {1},
      value.defined() ? static_cast<int64_t>(value.scalar_type()) : kUndefined,
      at::kLong);
  TESSERA_RETURN_IF_ERROR(
      pipeline.Broadcast(head, part.home, {"dtype of a stage's parameter"})
          .Wait());
  const int64_t dtype = *head.const_data_ptr<int64_t>();
  if (dtype == kUndefined) return at::Tensor();
  const at::Tensor whole =
      part.stands_in()
          ? at::empty(part.sizes, static_cast<at::ScalarType>(dtype))
          : value.contiguous();
  TESSERA_RETURN_IF_ERROR(pipeline
                              .Broadcast(whole.view({-1}), part.home,
                                         {"value of a stage's parameter"})
                              .Wait());
  return whole;
}

absl::StatusOr<at::Tensor> JoinParts(const ShardedModel& model,
                                     const FlatParameter::Parameter& parameter,
                                     const at::Tensor& part) {
  if (!parameter.part.has_value()) return part;
  return CatchTorch(parameter.name, [&]() -> absl::StatusOr<at::Tensor> {
    TorchScope scope;
    if (parameter.part->of_pipeline()) {
      return FromHome(model, *parameter.part, part);
    }
    const at::Tensor mine = part.contiguous().view({-1});
    const int64_t ranks = parameter.part->parts;
    const at::Tensor all = at::empty({ranks * mine.numel()}, mine.options());
    TESSERA_RETURN_IF_ERROR(
        model.tensor()->AllGather(mine, all, {"parts of a parameter"}).Wait());
    const PartOfWhole split = parameter.part->Split();
    std::vector<int64_t> sizes = split.sizes;
    sizes[static_cast<size_t>(split.dim)] /= ranks;
    std::vector<at::Tensor> parts;
    for (const at::Tensor& one : all.chunk(ranks)) {
      parts.push_back(one.view(sizes));
    }
    return at::cat(parts, split.dim).view(parameter.part->sizes);
  });
}

at::Tensor PartIn(const at::Tensor& whole,
                  const FlatParameter::Parameter& parameter) {
  if (!parameter.part.has_value()) return whole;
  if (parameter.part->of_pipeline()) {
    return parameter.part->stands_in() ? at::zeros_like(parameter.tensor)
                                       : whole;
  }
  const PartOfWhole split = parameter.part->Split();
  const int64_t size =
      split.sizes[static_cast<size_t>(split.dim)] / split.parts;
  return whole.reshape(split.sizes)
      .narrow(split.dim, split.index * size, size)
      .reshape(parameter.tensor.sizes());
}

}  // namespace tessera
