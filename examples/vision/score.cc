#include "examples/vision/score.h"

#include <algorithm>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "torch/torch.h"

ScoreSums::ScoreSums(at::Device device)
    : sums_(torch::zeros({3}, at::TensorOptions(device).dtype(at::kDouble))) {}

void ScoreSums::Add(const at::Tensor& logits, const at::Tensor& labels) {
  namespace F = torch::nn::functional;
  const c10::NoGradGuard no_gradients;
  const at::Tensor loss =
      F::cross_entropy(logits.detach().to(at::kFloat), labels,
                       F::CrossEntropyFuncOptions().reduction(torch::kSum));
  const at::Tensor correct = logits.argmax(1).eq(labels).sum();
  sums_.add_(at::stack({loss.to(at::kDouble), correct.to(at::kDouble),
                        at::full_like(loss, labels.size(0), at::kDouble)}));
}

absl::StatusOr<Score> ScoreSums::OverRanks(const tessera::World& world) const {
  at::Tensor sums = sums_.clone();
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->AllReduceSum(sums, {"loss and accuracy"}).Wait());
  sums = sums.cpu();
  const double samples = sums[2].item<double>();
  if (samples == 0) {
    return absl::FailedPreconditionError("loss and accuracy of no samples");
  }
  return Score{sums[0].item<double>() / samples,
               sums[1].item<double>() / samples, static_cast<int64_t>(samples)};
}

std::string ScoreSums::State() const {
  const at::Tensor sums = sums_.cpu();
  return absl::StrFormat("%a %a %a", sums[0].item<double>(),
                         sums[1].item<double>(), sums[2].item<double>());
}

absl::Status ScoreSums::Load(absl::string_view state) {
  const std::vector<std::string> words = absl::StrSplit(state, ' ');
  std::vector<double> sums(words.size());
  for (size_t i = 0; i < words.size(); ++i) {
    if (words.size() != 3 || !absl::SimpleAtod(words[i], &sums[i])) {
      return absl::DataLossError(
          absl::StrCat("expected three sums of an epoch, got '", state, "'"));
    }
  }
  sums_.copy_(torch::tensor(sums, torch::kDouble));
  return absl::OkStatus();
}

absl::StatusOr<Score> Evaluate(const tessera::World& world, int64_t samples,
                               int64_t batch, const Forward& forward) {
  const c10::NoGradGuard no_gradients;
  const int64_t ranks = world.world_size(), round = batch * ranks;
  ScoreSums sums(world.device());
  for (int64_t first = 0; first < samples; first += round) {
    std::vector<int64_t> mine;
    for (int64_t i = first + world.rank(); i < std::min(first + round, samples);
         i += ranks) {
      mine.push_back(i);
    }
    const bool counts = !mine.empty();
    if (!counts) mine.push_back(0);
    const auto [logits, labels] = forward(mine);
    if (counts) sums.Add(logits, labels);
  }
  return sums.OverRanks(world);
}
