#include "optim/sharded_optimizer.h"

#include <torch/torch.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "comm/fake_communicator_test_util.h"
#include "optim/step_test_util.h"
#include "sharding/flat/schedule.h"

namespace tessera {
namespace {

const OptimizerOptions kOptions = {
    .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.98, .eps = 1e-7, .weight_decay = 0.3};

// A function of a parameter with a given gradient; its values are not read.
struct WithGradient : torch::autograd::Function<WithGradient> {
  static at::Tensor forward(torch::autograd::AutogradContext* context,
                            const at::Tensor&, const at::Tensor& gradient) {
    context->save_for_backward({gradient});
    return torch::zeros({}, gradient.options());
  }
  static Tensors backward(torch::autograd::AutogradContext* context,
                          const Tensors&) {
    return {context->get_saved_variables()[0], at::Tensor()};
  }
};

// AdamW of one rank over one unit.
class RankOptimizer {
 public:
  // `dtype`: the working one, if not that of the values.
  RankOptimizer(const Tensors& values, int stage, int rank, int world_size,
                std::optional<at::ScalarType> dtype = std::nullopt)
      : comm_(std::make_shared<FakeCommunicator>(rank, world_size)),
        params_(CopyWithStorages(values)) {
    std::vector<NamedParameter> named;
    for (size_t i = 0; i < params_.size(); ++i) {
      params_[i].requires_grad_();
      named.push_back({absl::StrCat("p", i), params_[i], static_cast<int>(i)});
    }
    FlatParameterOptions options;
    options.stage = Stage::Of(stage);
    options.dtype = dtype;
    flat_ =
        FlatParameter::Prepare("unit", std::move(named), options, comm_,
                               std::make_shared<Schedule>(ScheduleOptions()))
            .value();
    TESSERA_EXPECT_OK(flat_->Adopt());
    optimizer_ =
        ShardedOptimizer::Create({flat_}, {{kOptions}, {"default"}, {}})
            .value();
    gradients_ = std::make_unique<Gradients>(
        std::vector<std::shared_ptr<FlatParameter>>{flat_}, comm_,
        GradientOptions(), std::vector<bool>(params_.size(), true));
  }
  ~RankOptimizer() {
    gradients_.reset();
    flat_->Abandon();
  }

  // As if autograd had found these gradients.
  absl::Status Step(const Tensors& gradients, double factor = 1) {
    auto backward = [&] {
      at::Tensor loss = torch::zeros({});
      for (size_t i = 0; i < params_.size(); ++i) {
        if (!gradients[i].defined()) continue;
        loss = loss + WithGradient::apply(params_[i], gradients[i]).to(loss);
      }
      loss.backward();
    };
    TESSERA_RETURN_IF_ERROR(gradients_->Run(backward, {"a step"}));
    TESSERA_RETURN_IF_ERROR(flat_->PrepareUpdate());
    TESSERA_RETURN_IF_ERROR(optimizer_->Prepare(*gradients_));
    const absl::Status stepped = optimizer_->Step(gradients_.get(), factor);
    gradients_->Zero();
    return stepped;
  }

  // "" if the owned parts are those of the reference.
  std::string Difference(const AdamWReference& reference) {
    for (const auto& segment : flat_->segments()) {
      const auto& p = flat_->parameters()[segment.parameter];
      const int64_t from = segment.range.begin - p.range.begin;
      const int64_t place = segment.range.begin - flat_->owned().begin;
      auto same = [&](const Tensors& whole, const at::Tensor& owned) {
        const at::Tensor t = whole[segment.parameter];
        const auto item = static_cast<int64_t>(t.element_size());
        return std::memcmp(
                   static_cast<const char*>(t.const_data_ptr()) + from * item,
                   static_cast<const char*>(owned.const_data_ptr()) +
                       place * item,
                   static_cast<size_t>(segment.range.numel() * item)) == 0;
      };
      const char* what =
          !same(reference.params, flat_->states().value().View()) ? "values"
          : !same(reference.exp_avgs, flat_->states().moments()[0].View())
              ? "exp_avg"
          : !same(reference.exp_avg_sqs, flat_->states().moments()[1].View())
              ? "exp_avg_sq"
              : nullptr;
      if (what != nullptr) {
        return absl::StrCat(what, " of ", p.name, " from element ", from, ", ",
                            segment.range.numel(), " elements");
      }
    }
    return "";
  }
  ShardedOptimizer& optimizer() { return *optimizer_; }
  FlatParameter& flat() { return *flat_; }

 private:
  std::shared_ptr<Communicator> comm_;
  Tensors params_;
  std::shared_ptr<FlatParameter> flat_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  std::unique_ptr<Gradients> gradients_;
};

// Three steps on every rank of W; parameter i is skipped in step s if
// skip(s, i).
template <typename Skip>
void ExpectSegmentsEqualWhole(const Tensors& values, int stage, int world_size,
                              Skip skip) {
  std::vector<Tensors> sums, means;
  for (int step = 0; step < 3; ++step) {
    Tensors sum, mean;
    for (size_t i = 0; i < values.size(); ++i) {
      at::Tensor g =
          skip(step, i) ? at::Tensor() : torch::randn_like(values[i]);
      sum.push_back(g);
      mean.push_back(g.defined() ? g.div(world_size) : g);
    }
    sums.push_back(sum);
    means.push_back(mean);
  }
  AdamWReference reference(kOptions, values);
  for (const Tensors& gradients : means) reference.Step(gradients);
  for (int rank = 0; rank < world_size; ++rank) {
    RankOptimizer optimizer(values, stage, rank, world_size);
    for (const Tensors& gradients : sums) {
      TESSERA_ASSERT_OK(optimizer.Step(gradients));
    }
    EXPECT_EQ(optimizer.Difference(reference), "")
        << "rank " << rank << "/" << world_size;
    EXPECT_EQ(optimizer.optimizer().counts().steps(), reference.steps);
  }
}

bool Never(int, size_t) { return false; }

class ShardedOptimizerTest
    : public ::testing::TestWithParam<std::tuple<int, at::ScalarType>> {
 protected:
  ShardedOptimizerTest() { torch::manual_seed(5); }
  int stage() const { return std::get<0>(GetParam()); }
  at::Tensor Random(at::IntArrayRef sizes) {
    return torch::randn(sizes, std::get<1>(GetParam()));
  }
};

TEST_P(ShardedOptimizerTest, GivesTheSameBitsAtEveryCut) {
  // One storage of 16 groups and a bit: W = 17 cuts it after each of them.
  const at::Tensor value = Random({1005});
  for (int world_size : {1, 2, 3, 4, 5, 6, 8, 16, 17, 18}) {
    ExpectSegmentsEqualWhole({value}, stage(), world_size, Never);
  }
}

TEST_P(ShardedOptimizerTest, GivesTheSameBitsForManySizes) {
  Tensors values;
  for (int64_t numel :
       {1, 2, 3, 15, 16, 17, 31, 63, 64, 65, 127, 128, 129, 257, 1009, 2048}) {
    values.push_back(Random({numel}));
  }
  values.push_back(Random({13, 7, 5}).transpose(0, 2));
  for (int world_size : {1, 2, 3, 4}) {
    ExpectSegmentsEqualWhole(values, stage(), world_size, Never);
  }
}

TEST_P(ShardedOptimizerTest, GivesTheSameBitsAtOddPlacesOfASharedStorage) {
  const at::Tensor all = Random({1400});
  const Tensors values = {all.narrow(0, 3, 501), all.narrow(0, 505, 1),
                          all.narrow(0, 507, 64), all.narrow(0, 639, 700),
                          Random({70})};
  for (int world_size : {1, 2, 3, 4, 6, 23}) {
    ExpectSegmentsEqualWhole(values, stage(), world_size, Never);
  }
}

TEST_P(ShardedOptimizerTest, GivesTheSameBitsForParametersWithoutGaps) {
  const at::Tensor all = Random({65 + 640});
  const Tensors values = {Random({128}),        Random({64}),
                          Random({64, 3}),      Random({63}),
                          all.narrow(0, 0, 65), all.narrow(0, 65, 640)};
  for (int world_size : {1, 2, 3}) {
    ExpectSegmentsEqualWhole(values, stage(), world_size, Never);
    // The second has other step counts than its neighbours.
    ExpectSegmentsEqualWhole(
        values, stage(), world_size,
        [](int step, size_t i) { return i == 1 && step == 0; });
  }
}

TEST_P(ShardedOptimizerTest, LeavesASkippedParameterAndItsStepCountAlone) {
  const Tensors values = {Random({300}), Random({301}), Random({20})};
  for (int world_size : {1, 2, 3}) {
    // The first always has a gradient, the second never, the third sometimes.
    ExpectSegmentsEqualWhole(
        values, stage(), world_size,
        [](int step, size_t i) { return i == 1 || (i == 2 && step == 1); });
  }
}

TEST_P(ShardedOptimizerTest, DoesNotDependOnTheNumberOfThreads) {
  // More elements than libtorch gives to one thread.
  const Tensors values = {Random({140'003})};
  const int threads = at::get_num_threads();
  const at::Tensor gradient = torch::randn_like(values[0]);
  at::set_num_threads(1);
  AdamWReference one(kOptions, values);
  one.Step({gradient});
  at::set_num_threads(3);
  RankOptimizer three(values, stage(), 0, 1);
  TESSERA_ASSERT_OK(three.Step({gradient}));
  at::set_num_threads(threads);
  EXPECT_EQ(three.Difference(one), "");
}

TEST_P(ShardedOptimizerTest, MultipliesGradients) {
  const Tensors values = {Random({300}), Random({77})};
  const Tensors gradients = {torch::randn_like(values[0]),
                             torch::randn_like(values[1])};
  AdamWReference reference(kOptions, values);
  RankOptimizer optimizer(values, stage(), 0, 1);
  for (double factor : {0.3, 1.0, 1.0 / 3}) {
    reference.Step(gradients, factor);
    TESSERA_ASSERT_OK(optimizer.Step(gradients, factor));
    EXPECT_EQ(optimizer.Difference(reference), "") << factor;
  }
  // The masters are the copy.
  EXPECT_EQ(optimizer.flat().states().separate_working(), nullptr);
}

// That of what is skipped, too, although nothing writes it.
TEST_P(ShardedOptimizerTest, WritesA16BitWorkingCopy) {
  if (std::get<1>(GetParam()) != at::kFloat) GTEST_SKIP() << "masters in float";
  const Tensors values = {Random({40'000}), Random({20}), Random({301})};
  for (at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    for (int rank : {0, 1}) {
      RankOptimizer optimizer(values, stage(), rank, 2, dtype);
      for (int step = 0; step < 2; ++step) {
        TESSERA_ASSERT_OK(optimizer.Step(
            {torch::randn({40'000}, dtype), torch::randn({20}, dtype),
             step == 0 ? torch::randn({301}, dtype) : at::Tensor()}));
        FlatParameter& flat = optimizer.flat();
        const at::Tensor masters = flat.states().value().View();
        const at::Tensor working = flat.states().separate_working()->View();
        EXPECT_TRUE(at::equal(working, masters.to(dtype)));
        // The kernel does it, and no pass after it.
        const UnitStep unit(flat, HasGradient(3, true), {2, 2, 2}, {kOptions},
                            {0, 0, 0}, 1);
        UnitStep::Counts counts;
        bool changed = false;
        EXPECT_THAT(StepHere(&flat, unit, torch::randn_like(masters), &counts,
                             &changed),
                    IsOkAndHolds(true));
        EXPECT_TRUE(at::equal(working, masters.to(dtype)));
        // Publishes what it has been given, if told so.
        const at::Tensor mine = working.clone();
        masters.fill_(7);
        TESSERA_ASSERT_OK(flat.PublishOwned({.working_written = true}));
        EXPECT_TRUE(at::equal(working, mine));
        TESSERA_ASSERT_OK(flat.PublishOwned());
        EXPECT_EQ(working.ne(7).sum().item<int64_t>(), 0);
      }
    }
  }
}

TEST_P(ShardedOptimizerTest, CountsItsBytes) {
  RankOptimizer optimizer({Random({1000})}, stage(), 1, 2);
  // Half of 1024 elements, twice.
  const int64_t item = c10::elementSize(std::get<1>(GetParam()));
  EXPECT_EQ(optimizer.optimizer().resident_bytes(), 2 * 512 * item);
}

INSTANTIATE_TEST_SUITE_P(All, ShardedOptimizerTest,
                         ::testing::Combine(::testing::Values(1, 2, 3),
                                            ::testing::Values(at::kFloat,
                                                              at::kDouble)),
                         [](const auto& info) {
                           return absl::StrCat(
                               "Stage", std::get<0>(info.param),
                               c10::toString(std::get<1>(info.param)));
                         });

}  // namespace
}  // namespace tessera
