#include "optim/gradients/gradient_norms.h"

#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "optim/gradients/owned_gradients.h"
#include "optim/norm/grad_norm.h"

namespace tessera {
absl::StatusOr<std::vector<double>> GradientNorms(
    const std::vector<std::shared_ptr<FlatParameter>>& flats,
    const Gradients& gradients, const std::vector<int>& set_of, size_t sets,
    double norm_type, Communicator* comm) {
  std::vector<NormSum> sums(sets, NormSum(norm_type));
  TESSERA_RETURN_IF_ERROR(VisitShards(
      "gradient norm", flats, gradients,
      [&](const auto&, const GradientParts& parts) {
        for (const GradientPart& part : parts) {
          const int set = set_of[static_cast<size_t>(part.parameter.index)];
          sums[static_cast<size_t>(set)].Add(part.values, part.first);
        }
      }));
  TESSERA_RETURN_IF_ERROR(CatchTorch("gradient norm", [&] {
    TorchScope scope;
    for (NormSum& sum : sums) sum.Finish();
  }));
  TESSERA_RETURN_IF_ERROR(SumOverRanks(CopiesOver(*flats[0], *comm),
                                       CommTag{"gradient norm"}, comm, &sums));
  std::vector<double> norms;
  for (const NormSum& sum : sums) norms.push_back(sum.Norm());
  return norms;
}

}  // namespace tessera
