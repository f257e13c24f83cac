// libtorch's own data parallelism, c10d::Reducer, as a second oracle for stage
// 0: the same losses and parameters, to the bit.
//
// It divides by W before it sums. Halves are exact, so that two ranks agree
// with ours whoever sums. Three do where a hook divides afterwards and sums are
// in rank order.
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/torch_guard.h"
#include "comm/communicator.h"
#include "comm/world/world.h"
#include "gtest/gtest.h"
#include "tests/support/libtorch_adamw.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"
#include "torch/csrc/distributed/c10d/FileStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "torch/csrc/distributed/c10d/reducer.hpp"

namespace tessera {
namespace {

using Group = c10::intrusive_ptr<c10d::ProcessGroup>;
using CommunicatorPtr = std::shared_ptr<Communicator>;

// `path` is a file for the ranks to meet by, for this call only.
Group MakeGroup(const std::string& path, const World& world) {
  const int rank = world.rank(), size = world.world_size();
  auto store = c10::make_intrusive<c10d::FileStore>(path, size);
  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(
      c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  options->threads = 1;
  group->setBackend(
      at::kCPU, c10d::ProcessGroup::BackendType::GLOO,
      c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options));
  return group;
}

// Sums in rank order, and divides after that.
class SumThenDivide : public c10d::CppCommHookInterface<CommunicatorPtr> {
 public:
  using CppCommHookInterface::CppCommHookInterface;
  c10::intrusive_ptr<c10::ivalue::Future> runHook(
      c10d::GradBucket& bucket) override {
    at::Tensor buffer = bucket.getBuffer();
    ThrowIfError(state_->AllReduceSum(buffer, {"bucket"}).Wait());
    buffer.div_(state_->world_size());
    auto future =
        c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get());
    future->markCompleted(buffer);
    return future;
  }
};

// Makes it as DistributedDataParallel does, with small buckets.
std::unique_ptr<c10d::Reducer> MakeReducer(
    const std::vector<at::Tensor>& parameters, const Group& group) {
  constexpr int64_t kBucketBytes = 2000;
  auto buckets = std::get<0>(
      c10d::compute_bucket_assignment_by_size(parameters, {kBucketBytes}));
  std::reverse(buckets.begin(), buckets.end());
  return std::make_unique<c10d::Reducer>(
      parameters, std::move(buckets), group,
      /*expect_sparse_gradients=*/std::vector<bool>(parameters.size()),
      kBucketBytes, /*find_unused_parameters=*/true,
      /*gradient_as_bucket_view=*/false,
      /*param_names=*/std::unordered_map<size_t, std::string>(),
      /*first_bucket_bytes_cap=*/kBucketBytes,
      /*skip_all_reduce_unused_params=*/false,
      /*use_python_reducer=*/false,
      /*bucket_bytes_cap_list=*/std::vector<int64_t>());
}

// AdamW as the oracle's options have it, of one parameter.
struct AdamW {
  explicit AdamW(const at::Tensor& p)
      : exp_avg(torch::zeros_like(p)), exp_avg_sq(torch::zeros_like(p)) {}
  void Step(at::Tensor p, const OracleOptions& o) {
    torch::NoGradGuard no_grad;
    if (!p.grad().defined()) return;
    LibtorchAdamW(p, exp_avg, exp_avg_sq, p.grad(), ++steps, o.optimizer);
    p.mutable_grad().reset();
  }
  at::Tensor exp_avg, exp_avg_sq;
  int64_t steps = 0;
};

// `sum` takes the sums in rank order, which are divided afterwards; if it is
// null, `group` does all of it.
Record TrainWithReducer(const TrainingSpec& spec, const Group& group,
                        const CommunicatorPtr& sum) {
  auto model = BuildModel(spec.model, group->getRank());
  const OracleOptions options = OracleOptionsOf(spec, group->getSize());
  std::vector<at::Tensor> parameters = model->parameters();
  std::vector<AdamW> optimizer(parameters.begin(), parameters.end());
  auto reducer = MakeReducer(parameters, group);
  if (sum != nullptr) {
    reducer->register_comm_hook(std::make_unique<SumThenDivide>(sum));
  }
  Record record;
  for (int step = 0; step < spec.steps; ++step) {
    at::Tensor loss = model->Loss(group->getRank(), step);
    reducer->prepare_for_backward({loss});
    loss.backward();
    record.push_back(LossLine(step, 0, loss));
    for (size_t i = 0; i < parameters.size(); ++i) {
      optimizer[i].Step(parameters[i], options);
    }
  }
  for (const auto& p : model->named_parameters()) {
    record.push_back(ParameterLine(p.key(), p.value()));
  }
  AddState(*model, at::detail::getDefaultCPUGenerator().get_state(), &record);
  return record;
}

// `args`: path, "group" or "rank-order", spec.
TESSERA_RANK_FUNCTION(Reducer) {
  const std::vector<std::string> words =
      absl::StrSplit(args, absl::MaxSplits(' ', 2));
  const CommunicatorPtr sum =
      words[1] == "rank-order" ? world.communicator() : nullptr;
  return ToText(TrainWithReducer(TrainingSpec::FromText(words[2]),
                                 MakeGroup(words[0], world), sum));
}

void ExpectSameFromReducer(int world_size, const std::string& sum) {
  for (const char* model : {"Mlp", "Gpt"}) {
    TrainingSpec spec;
    spec.model = model;
    spec.steps = 5;
    SCOPED_TRACE(spec.ToText());
    ExpectEqualsOracle(spec, world_size);
    const auto& expected = TrainWithOracle(spec, world_size);
    const std::string path =
        absl::StrCat(testing::TempDir(), "/reducer.", world_size, model);
    const auto answers =
        RankPool::Get(world_size)
            ->Run("Reducer", absl::StrCat(path, " ", sum, " ", spec.ToText()));
    for (int rank = 0; rank < world_size; ++rank) {
      ASSERT_TRUE(answers[rank].ok()) << answers[rank].status();
      EXPECT_EQ(FirstDifference(expected[rank], RecordFromText(*answers[rank])),
                "")
          << "rank " << rank;
    }
  }
}

TEST(Reducer, OfTwoRanksOverGloo) { ExpectSameFromReducer(2, "group"); }

TEST(Reducer, OfThreeRanksInRankOrder) {
  ExpectSameFromReducer(3, "rank-order");
}

}  // namespace
}  // namespace tessera
