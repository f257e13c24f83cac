// Ordinary modules over the stages of a pipeline, each a thread here: loss and
// gradients are the whole module's, to the bit.
#include "parallel/pipeline/staged_run.h"

#include <torch/torch.h>

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "base/torch/storage_access.h"
#include "base/torch_guard.h"
#include "gtest/gtest.h"
#include "parallel/plan/planned_models_test_util.h"

namespace tessera {
namespace {

using at::Tensor;

// What all stages of a process have posted.
class PostOffice {
 public:
  void Put(int from, int to, int64_t key, Tensor message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    messages_[{from, to, key}] = std::move(message);
    changed_.notify_all();
  }
  Tensor Take(int from, int to, int64_t key) {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto place = std::tuple(from, to, key);
    if (!changed_.wait_for(lock, std::chrono::seconds(10),
                           [&] { return messages_.count(place) > 0; })) {
      return {};
    }
    Tensor message = messages_[place];
    messages_.erase(place);
    return message;
  }
  size_t left() const { return messages_.size(); }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::tuple<int, int, int64_t>, Tensor> messages_;
};

class PostLinks final : public StageLinks {
 public:
  PostLinks(PostOffice* post, int stage) : post_(post), stage_(stage) {}
  void Post(int to, int64_t key, Tensor message) override {
    post_->Put(stage_, to, key, std::move(message));
  }
  absl::Status Take(int from, int64_t key, const Tensor& message,
                    const std::string& what) override {
    const Tensor sent = post_->Take(from, stage_, key);
    if (!sent.defined()) return absl::DeadlineExceededError(what);
    if (sent.numel() != message.numel()) {
      return absl::InvalidArgumentError(what);
    }
    std::memcpy(message.mutable_data_ptr(), sent.const_data_ptr(),
                static_cast<size_t>(sent.nbytes()));
    return absl::OkStatus();
  }

 private:
  PostOffice* const post_;
  const int stage_;
};

struct Program {
  std::shared_ptr<torch::nn::Module> module;
  std::function<Tensor(const Tensor& tokens)> loss;
};
using MakeProgram = std::function<Program()>;

Program NetOf(PlannedNetOptions options) {
  torch::manual_seed(5);
  PlannedNet net(options);
  return {net.ptr(),
          [net](const Tensor& tokens) mutable { return net->Loss(tokens); }};
}

const std::map<std::string, MakeProgram>& Programs() {
  static const auto* const all = new std::map<std::string, MakeProgram>{
      {"Gpt", [] { return NetOf({}); }},
      {"Fused", [] { return NetOf({.fused = true}); }},
      {"Llama", [] { return NetOf({.key_heads = 3, .llama = true}); }},
      {"Tied", [] { return NetOf({.layers = 3, .tied = true}); }},
  };
  return *all;
}

struct Outcome {
  std::vector<Tensor> losses;
  std::map<std::string, Tensor> gradients;  // of this stage
};

constexpr int kMicroBatches = 3;

Outcome RunStage(const Program& program, const std::vector<Tensor>& batches,
                 int stage, int stages, PostOffice* post) {
  const auto named = program.module->named_parameters();
  std::vector<StagedParameter> parameters;
  int i = 0;
  for (const auto& each : named) {
    const int home = static_cast<int>(int64_t{i++} * stages /
                                      static_cast<int64_t>(named.size()));
    if (home != stage) {
      const Tensor& p = each.value();
      SetStorage(p,
                 c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(
                     AbsentStorage(p.storage().nbytes(), at::kCPU)
                         .unsafeGetStorageImpl()),
                 p.scalar_type());
    }
    parameters.push_back({each.value(), each.key(), home});
  }
  StagedRun run(stage, stages, /*one_way=*/true, /*casts_inputs=*/false,
                parameters, std::make_shared<PostLinks>(post, stage));
  Outcome outcome;
  std::vector<Tensor> losses;
  const auto backward = [&](int micro_batch) {
    {
      StagedRun::Scope scope(&run, micro_batch, /*backward=*/true, "backward");
      Tensor& loss = losses[static_cast<size_t>(micro_batch)];
      loss = run.BringEverywhere(loss);
      loss.backward();
      outcome.losses.push_back(loss.detach().clone());
      loss.reset();
    }
    run.EndMicroBatch();
  };
  for (int b = 0; b < kMicroBatches; ++b) {
    {
      StagedRun::Scope scope(&run, b, /*backward=*/false, "forward");
      losses.push_back(program.loss(batches[static_cast<size_t>(b)]));
    }
    if (b > 0) backward(b - 1);  // two are under way
  }
  backward(kMicroBatches - 1);
  {
    StagedRun::Scope scope(&run, kMicroBatches, /*backward=*/false, "end");
    run.EndBatch();
  }
  for (const StagedParameter& p : parameters) {
    if (p.home == stage) outcome.gradients[p.name] = p.tensor.grad();
  }
  return outcome;
}

class StagedRunTest
    : public testing::TestWithParam<std::tuple<std::string, int>> {};

TEST_P(StagedRunTest, LossAndGradientsHaveTheBitsOfTheWhole) {
  const std::string& name = std::get<0>(GetParam());
  const int stages = std::get<1>(GetParam());
  const MakeProgram& make = Programs().at(name);
  torch::manual_seed(4);
  std::vector<Tensor> batches;
  for (int b = 0; b < kMicroBatches; ++b) {
    batches.push_back(torch::randint(30, {2, 7}, torch::kLong));
  }
  const Program whole = make();
  std::vector<Tensor> expected;
  for (const Tensor& batch : batches) {
    expected.push_back(whole.loss(batch));
    expected.back().backward();
  }
  std::vector<Program> programs;
  for (int s = 0; s < stages; ++s) programs.push_back(make());
  PostOffice post;
  std::vector<absl::StatusOr<Outcome>> outcomes(static_cast<size_t>(stages));
  std::vector<std::thread> threads;
  for (int s = 0; s < stages; ++s) {
    threads.emplace_back([&, s] {
      const auto at = static_cast<size_t>(s);
      outcomes[at] = CatchTorch("stage", [&] {
        return RunStage(programs[at], batches, s, stages, &post);
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  size_t gradients = 0;
  for (const auto& outcome : outcomes) {
    ASSERT_TRUE(outcome.ok()) << outcome.status();
    for (size_t b = 0; b < expected.size(); ++b) {
      EXPECT_TRUE(torch::equal(outcome->losses[b], expected[b]));
    }
    for (const auto& [parameter, gradient] : outcome->gradients) {
      ++gradients;
      const Tensor wanted = whole.module->named_parameters()[parameter].grad();
      ASSERT_EQ(gradient.defined(), wanted.defined()) << parameter;
      EXPECT_TRUE(torch::equal(gradient, wanted)) << parameter;
    }
  }
  EXPECT_EQ(gradients, whole.module->parameters().size());
  EXPECT_EQ(post.left(), 0);
}

std::vector<std::string> Names() {
  std::vector<std::string> names;
  for (const auto& [name, program] : Programs()) names.push_back(name);
  return names;
}

INSTANTIATE_TEST_SUITE_P(All, StagedRunTest,
                         testing::Combine(testing::ValuesIn(Names()),
                                          testing::Values(2, 3)));

}  // namespace
}  // namespace tessera
