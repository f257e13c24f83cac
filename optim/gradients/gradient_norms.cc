#include "optim/gradients/gradient_norms.h"

#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "optim/gradients/owned_gradients.h"
#include "optim/norm/grad_norm.h"

namespace tessera {
namespace {

using Flats = std::vector<std::shared_ptr<FlatParameter>>;

// Returns this rank's part of the sums of each set.
absl::StatusOr<std::vector<NormSum>> SumsHere(const Flats& flats,
                                              const Gradients& gradients,
                                              const std::vector<int>& set_of,
                                              size_t sets, double norm_type) {
  std::vector<NormSum> sums(sets, NormSum(norm_type));
  TESSERA_RETURN_IF_ERROR(CatchTorch("gradient norm", [&]() -> absl::Status {
    TorchScope scope;
    for (size_t u = 0; u < flats.size(); ++u) {
      const FlatGradient& gradient = gradients.of(u);
      if (!gradient.has_step_gradient()) continue;
      TESSERA_ASSIGN_OR_RETURN(const Raised raised, gradient.Raise());
      VisitShard(*flats[u], gradient,
                 [&](const FlatParameter::Parameter& p,
                     const at::Tensor& segment, int64_t first) {
                   const int set = set_of[static_cast<size_t>(p.index)];
                   sums[static_cast<size_t>(set)].Add(segment, first);
                 });
    }
    for (NormSum& sum : sums) sum.Finish();
    return absl::OkStatus();
  }));
  return sums;
}

}  // namespace

absl::StatusOr<std::vector<double>> GradientNorms(
    const Flats& flats, const Gradients& gradients,
    const std::vector<int>& set_of, size_t sets, double norm_type,
    Communicator* comm) {
  TESSERA_ASSIGN_OR_RETURN(std::vector<NormSum> sums,
                           SumsHere(flats, gradients, set_of, sets, norm_type));
  TESSERA_RETURN_IF_ERROR(SumOverRanks(flats[0]->communicator()->world_size(),
                                       CommTag{"gradient norm"}, comm, &sums));
  std::vector<double> norms;
  for (const NormSum& sum : sums) norms.push_back(sum.Norm());
  return norms;
}

}  // namespace tessera
