// libtorch writes gradients in their places
// (sharding/gradient/gradient_places.h). If a place turns out to be another
// tensor's, the bits are those of copied gradients, and a user's tensors stay
// unchanged.
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "base/torch/tensor_memory.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

constexpr int kSteps = 7;
constexpr int kKnown = 3;  // steps, after which all allocations are known
constexpr int64_t kDim = 24;

// Three matrices of one size, and one of another.
struct Matrices : torch::nn::Module {
  Matrices() {
    for (const char* name : {"a", "b", "c"}) {
      square.push_back(register_parameter(name, torch::randn({kDim, kDim})));
    }
    wide = register_parameter("wide", torch::randn({kDim, 2 * kDim}));
  }
  // Computes x -> tanh(x * w) with these in turn.
  at::Tensor Loss(int rank, int step, const std::vector<int>& order) {
    at::Tensor x = torch::full({kDim, kDim}, 0.1 * (rank + 1) + 0.01 * step);
    for (int i : order) x = torch::tanh(x.mm(square[i]) / kDim);
    return x.mm(wide).square().mean();
  }
  std::vector<at::Tensor> square;
  at::Tensor wide;
};

struct Run {
  std::shared_ptr<Matrices> model;
  std::unique_ptr<Engine> engine;
  int rank = 0;
  std::vector<int> lent;  // by step, gradients that lay in their places

  // Extra is what each step does in addition, before its Backward.
  using Extra = std::function<void(Run& run, int step, at::Tensor& loss)>;

  static absl::StatusOr<Run> Make(const World& world, absl::string_view args) {
    SetPoisonOnFree(true);
    torch::manual_seed(5);
    Run run;
    run.rank = world.rank();
    run.model = std::make_shared<Matrices>();
    TESSERA_ASSIGN_OR_RETURN(run.engine,
                             MakeEngine(run.model, TrainingSpec::FromText(args),
                                        world.communicator()));
    return run;
  }

  absl::Status Train(const std::function<std::vector<int>(int step)>& order,
                     const Extra& extra = nullptr) {
    for (const at::Tensor& p : model->parameters()) {
      p.register_hook([this](const at::Tensor& gradient) {
        lent.back() += TensorMemoryAt(gradient.const_data_ptr()) != nullptr;
      });
    }
    for (int step = 0; step < kSteps; ++step) {
      lent.push_back(0);
      at::Tensor loss = model->Loss(rank, step, order(step));
      if (extra != nullptr) extra(*this, step, loss);
      TESSERA_RETURN_IF_ERROR(engine->Backward(loss));
      TESSERA_RETURN_IF_ERROR(engine->Step());
    }
    return absl::OkStatus();
  }

  // Returns the parameters, and after " lent " how many gradients lay in their
  // places.
  absl::StatusOr<std::string> Finish() {
    TESSERA_ASSIGN_OR_RETURN(const Record record,
                             ParametersOf(*engine, *model));
    TESSERA_RETURN_IF_ERROR(engine->Close());
    std::string text = absl::StrCat(ToText(record), " lent ");
    for (int n : lent) absl::StrAppend(&text, n);
    SetPoisonOnFree(false);
    return text;
  }
};

std::vector<int> InOrder(int) { return {0, 1, 2}; }

// The parameters are stage and world size.
class GradientPlacesTest
    : public ::testing::TestWithParam<std::tuple<int, int>> {
 protected:
  // Runs it with copies and with places; expects the same parameters. Returns
  // what was lent on each rank, "0004444".
  std::vector<std::string> LentBy(absl::string_view function) {
    TrainingSpec spec;
    spec.stage = std::get<0>(GetParam());
    const int world_size = std::get<1>(GetParam());
    std::vector<std::string> parameters, lent;
    for (const int64_t bytes : {0, 1}) {
      spec.in_place_gradient_bytes = bytes;
      for (const auto& answer :
           RankPool::Get(world_size)->Run(function, spec.ToText())) {
        TESSERA_EXPECT_OK(answer.status());
        if (!answer.ok()) return {};
        const size_t end = answer->rfind(" lent ");
        parameters.push_back(answer->substr(0, end));
        (bytes == 0 ? none_ : lent).push_back(answer->substr(end + 6));
      }
    }
    EXPECT_THAT(parameters, ::testing::Each(parameters[0]));
    EXPECT_THAT(none_, ::testing::Each(std::string(kSteps, '0')));
    return lent;
  }
  std::vector<std::string> none_;
};
INSTANTIATE_TEST_SUITE_P(All, GradientPlacesTest,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(1, 2)),
                         [](const auto& info) {
                           return absl::StrCat("Stage", std::get<0>(info.param),
                                               "World",
                                               std::get<1>(info.param));
                         });

TESSERA_RANK_FUNCTION(TheSameEachStep) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(world, args));
  TESSERA_RETURN_IF_ERROR(run.Train(&InOrder));
  return run.Finish();
}

TEST_P(GradientPlacesTest, AreKnownFromTheThirdBackwardOn) {
  EXPECT_THAT(LentBy("TheSameEachStep"), ::testing::Each("0044444"));
}

// The places of a and c are then each other's.
TESSERA_RANK_FUNCTION(AnotherOrder) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(world, args));
  TESSERA_RETURN_IF_ERROR(run.Train([](int step) {
    return step < kKnown ? std::vector<int>{0, 1, 2}
                         : std::vector<int>{2, 1, 0};
  }));
  return run.Finish();
}

TEST_P(GradientPlacesTest, MayBeThoseOfOtherParameters) {
  EXPECT_FALSE(LentBy("AnotherOrder").empty());
}

// From then on one matrix has no gradient, and another has two.
TESSERA_RANK_FUNCTION(OneTwice) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(world, args));
  TESSERA_RETURN_IF_ERROR(run.Train([](int step) {
    return step < kKnown ? std::vector<int>{0, 1, 2}
                         : std::vector<int>{0, 2, 2};
  }));
  return run.Finish();
}

TEST_P(GradientPlacesTest, MayStayEmpty) {
  EXPECT_FALSE(LentBy("OneTwice").empty());
}

// The backward uses a gradient after it arrived, and adds to it.
TESSERA_RANK_FUNCTION(AddToAfterwards) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(world, args));
  const at::Tensor factor =
      (torch::arange(kDim * kDim) / 100.0).view({kDim, kDim});
  TESSERA_RETURN_IF_ERROR(
      run.Train(&InOrder, [&](Run& r, int step, at::Tensor& loss) {
        const at::Tensor &a = r.model->square[0], &b = r.model->square[1];
        loss = b.square().sum();  // the last to arrive
        at::Tensor sum = a.view({kDim, kDim});
        if (step >= kKnown) {
          // The same tensor becomes the gradient of `a` and, with that of
          // `more` added, that of `twice`.
          const at::Tensor twice = b * 2;
          const at::Tensor more = (twice * 3).sum();
          sum = a.view({kDim, kDim}) + twice;
          loss = loss + more;
        }
        loss = loss + (sum * factor).sum() * (r.rank + 1);
      }));
  return run.Finish();
}

TEST_P(GradientPlacesTest, StayAsTheyArrived) {
  // A place is used in vain once; then it is known that others have that
  // tensor.
  EXPECT_THAT(LentBy("AddToAfterwards"), ::testing::Each("0021011"));
}

absl::Status ExpectUnchanged(const std::vector<at::Tensor>& kept,
                             const std::vector<at::Tensor>& copies) {
  for (size_t i = 0; i < kept.size(); ++i) {
    if (!kept[i].equal(copies[i])) {
      return absl::InternalError(absl::StrCat("tensor ", i, " has changed"));
    }
  }
  return absl::OkStatus();
}

// A user keeps `part` of each gradient at the steps that `keeps` names; it must
// stay unchanged. `check` runs before the engine ends.
absl::StatusOr<std::string> TrainKeeping(
    Run run, const std::function<at::Tensor(const at::Tensor&)>& part,
    const std::function<bool(int step)>& keeps,
    const std::function<absl::Status(size_t kept)>& check = nullptr) {
  std::vector<at::Tensor> kept, copies;
  bool keeping = false;
  for (const at::Tensor& p : run.model->parameters()) {
    p.register_hook([&](const at::Tensor& gradient) {
      if (!keeping) return;
      kept.push_back(part(gradient));
      copies.push_back(kept.back().clone());
    });
  }
  TESSERA_RETURN_IF_ERROR(run.Train(&InOrder, [&](Run&, int step, at::Tensor&) {
    keeping = keeps(step);
    if (step == kKnown) MemoryLedger::Host().ResetPeak();
  }));
  if (check != nullptr) TESSERA_RETURN_IF_ERROR(check(kept.size()));
  TESSERA_ASSIGN_OR_RETURN(std::string answer, run.Finish());
  run.engine.reset();
  TESSERA_RETURN_IF_ERROR(ExpectUnchanged(kept, copies));
  return answer;
}

TESSERA_RANK_FUNCTION(KeepGradients) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(world, args));
  return TrainKeeping(
      std::move(run), [](const at::Tensor& gradient) { return gradient; },
      [](int step) { return step == kKnown || step == kKnown + 1; },
      [](size_t kept) -> absl::Status {
        if (kept != 8) return absl::InternalError("no gradients came");
        // The two backwards' kept gradients are all in one flat parameter.
        constexpr int64_t kFlatBytes = 5 * kDim * kDim * sizeof(float);
        const int64_t peak =
            MemoryLedger::Host().Report()[MemoryKind::kGradients].peak_bytes;
        if (peak <= 4 * kFlatBytes + 4096) return absl::OkStatus();
        return absl::InternalError(
            absl::StrCat(peak, " bytes of gradients, a flat has ", kFlatBytes));
      });
}

TEST_P(GradientPlacesTest, StayWithAUserWhoKeepsThem) {
  // After the first one that is kept nothing is lent, nor in the next steps.
  EXPECT_THAT(LentBy("KeepGradients"), ::testing::Each("0041000"));
}

// A user keeps views, which libtorch does not see.
TESSERA_RANK_FUNCTION(KeepViews) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(world, args));
  return TrainKeeping(
      std::move(run),
      [](const at::Tensor& gradient) {
        return gradient.narrow(0, 1, 2).detach();
      },
      [](int step) { return step >= kKnown; });
}

TEST_P(GradientPlacesTest, StayWithAViewOfThem) {
  // As soon as one is kept, nothing is lent.
  EXPECT_THAT(LentBy("KeepViews"), ::testing::Each("0041000"));
}

// Tensors of the same size that a user makes in the backward, and keeps.
TESSERA_RANK_FUNCTION(KeepOthers) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(world, args));
  std::vector<at::Tensor> kept, copies;
  int in_places = 0;
  TESSERA_RETURN_IF_ERROR(run.Train(&InOrder, [&](Run&, int step,
                                                  at::Tensor& loss) {
    if (step < kKnown) return;
    loss.register_hook([&](const at::Tensor&) {
      for (int i = 0; i < 2; ++i) {
        kept.push_back(torch::full({kDim, kDim}, 7.0 + i));
        copies.push_back(torch::full({kDim, kDim}, 7.0 + i).clone());
        in_places += TensorMemoryAt(kept.back().const_data_ptr()) != nullptr;
      }
    });
  }));
  const bool places = TrainingSpec::FromText(args).in_place_gradient_bytes > 0;
  if ((in_places > 0) != places) {
    return absl::InternalError(absl::StrCat(in_places, " took a place"));
  }
  TESSERA_ASSIGN_OR_RETURN(std::string answer, run.Finish());
  run.engine.reset();
  TESSERA_RETURN_IF_ERROR(ExpectUnchanged(kept, copies));
  return answer;
}

TEST_P(GradientPlacesTest, MayBeTakenByOthersForGood) {
  EXPECT_FALSE(LentBy("KeepOthers").empty());
}

// A backward fails when some places are lent.
TESSERA_RANK_FUNCTION(FailOnce) {
  TESSERA_ASSIGN_OR_RETURN(Run run, Run::Make(world, args));
  bool fails = false;
  at::Tensor kept;
  run.model->square[1].register_hook([&](const at::Tensor& gradient) {
    if (!fails) return;
    kept = gradient;
    throw std::runtime_error("as asked");
  });
  absl::Status failed;
  TESSERA_RETURN_IF_ERROR(
      run.Train(&InOrder, [&](Run& r, int step, at::Tensor&) {
        if (step != kKnown) return;
        fails = true;
        failed = r.engine->Backward(r.model->Loss(r.rank, 0, InOrder(0)));
        fails = false;
      }));
  if (failed.ok()) return absl::InternalError("did not fail");
  return run.Finish();
}

TEST_P(GradientPlacesTest, OutliveABackwardThatFailed) {
  EXPECT_FALSE(LentBy("FailOnce").empty());
}

}  // namespace
}  // namespace tessera
