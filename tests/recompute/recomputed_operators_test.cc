// What a module's operators may be: what raw pointers made, functions of the
// user's, what cannot be computed again, what changes before backward.
#include <algorithm>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "sharding/dispatch/operator_watch.h"
#include "tests/recompute/recomputed_util.h"
#include "torch/csrc/autograd/custom_function.h"

namespace tessera {
namespace {

// ---- what a raw pointer made

// Fills memory of its own behind libtorch's back, with what it finds.
Tensor FilledByHand(const Tensor& h) {
  Tensor filled = torch::empty(h.sizes());
  const Tensor from = h.detach().contiguous();
  for (int64_t i = 0; i < filled.numel(); ++i) {
    filled.data_ptr<float>()[i] = from.data_ptr<float>()[i] * 0.5f + 1;
  }
  return h * filled;
}

TEST_F(RecomputedUnitsTest, KeepsWhatARawPointerFilled) {
  ExpectSameTraining([](Trained& run) { SetMiddle(run, FilledByHand); });
  EXPECT_EQ(ReportOf(FilledByHand).given_up, kBlocks);
}

Tensor FilledAndWritten(const Tensor& h) {
  Tensor filled = torch::empty({4 * kDim});
  for (int64_t i = 0; i < filled.numel(); ++i) {
    filled.data_ptr<float>()[i] = static_cast<float>(i);
  }
  filled.mul_(0.01);
  return h * filled.sin();
}

TEST_F(RecomputedUnitsTest, KeepsWhatWasFilledBeforeAnOperatorWrote) {
  ExpectSameTraining([](Trained& run) { SetMiddle(run, FilledAndWritten); });
  const RecomputeReport report = ReportOf(FilledAndWritten);
  EXPECT_EQ(report.given_up, kBlocks);
  EXPECT_THAT(report.held, ::testing::IsEmpty());
}

TEST_F(RecomputedUnitsTest, FollowsTensorsMadeOfVectors) {
  const auto middle = [](const Tensor& h) {
    return h * torch::tensor(
                   std::vector<float>{0.25f + torch::rand({1}).item<float>()});
  };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
}

// Memory that is gone, or another's, before backward.
TEST_F(RecomputedUnitsTest, FollowsBorrowedMemory) {
  const auto middle = [](const Tensor& h) {
    std::vector<float> values(4 * kDim * 1000, 0.5f);
    values[1] = torch::rand({1}).item<float>();
    const Tensor borrowed =
        torch::from_blob(values.data(), {1000, 4 * kDim}).clone();
    return h * borrowed[0];
  };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
  EXPECT_EQ(ReportOf(middle).given_up, kBlocks);
}

TEST_F(RecomputedUnitsTest, FollowsWhatAnAccessorFillsAnew) {
  Tensor scratch = torch::zeros({4 * kDim});
  int64_t filled = 0;
  const auto middle = [&](const Tensor& h) {
    scratch.data_ptr<float>()[3] = 0.25f * static_cast<float>(++filled % 7);
    return h.sigmoid() + scratch;
  };
  ExpectSameTraining([&](Trained& run) {
    filled = 0;
    SetMiddle(run, middle);
  });
}

// The schema calls it new, and it is a view.
TEST_F(RecomputedUnitsTest, FollowsUnsafeViews) {
  std::vector<std::vector<Tensor>> states;
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    for (const auto& block : *run.net->blocks) {
      auto* const b = block->as<Block>();
      b->first = [](const Tensor& x) {
        const auto halves = (x * 1).unsafe_chunk(2, 1);
        return torch::cat({halves[0].sigmoid_(), halves[1].tanh()}, 1);
      };
    }
    for (int step = 0; step < 3; ++step) run.Step(Input(step));
    states.push_back(run.State());
  }
  ExpectSameTensors(states[0], states[1]);
}

struct RawFunction : torch::autograd::Function<RawFunction> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x) {
    Tensor slopes = torch::empty(x.sizes());
    for (int64_t i = 0; i < slopes.numel(); ++i) {
      slopes.data_ptr<float>()[i] = static_cast<float>(i % 3);
    }
    context->save_for_backward({slopes});
    return x * 2;
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::tensor_list& gradients) {
    return {gradients[0] * context->get_saved_variables()[0]};
  }
};

// What no operator reads, autograd alone.
TEST_F(RecomputedUnitsTest, KeepsWhatARawPointerFilledForBackward) {
  const auto middle = [](const Tensor& h) { return RawFunction::apply(h); };
  ExpectSameTraining([&](Trained& run) {
    run.recompute()->set_check("never");
    SetMiddle(run, middle);
  });
}

TEST_F(RecomputedUnitsTest, KeepsAModuleOfNestedTensors) {
  const auto middle = [](const Tensor& h) {
    const Tensor nested = at::_nested_tensor_from_tensor_list(
        {h.detach().narrow(0, 0, 3), h.detach().narrow(0, 3, 2)});
    return h * nested.to_padded_tensor(0).sum();
  };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
}

// ---- autograd functions

struct Cubed : torch::autograd::Function<Cubed> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x) {
    const Tensor squared = x * x;
    context->save_for_backward({x, squared});
    return squared * x;
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::tensor_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * 3 * saved[1] + 0 * saved[0]};
  }
};

TEST_F(RecomputedUnitsTest, FollowsAutogradFunctions) {
  const auto middle = [](const Tensor& h) { return Cubed::apply(h); };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
  EXPECT_EQ(ReportOf(middle).given_up, kBlocks);
}

// ---- what cannot be computed again is kept

Tensor ScaledByCalls(const Tensor& x) {
  return x * static_cast<double>(1 + drawn++ % 5);
}
// Other bits when it is computed again.
Tensor Unsteady(const Tensor& x) { return ReplayMark::IsSet() ? x * 2 : x * 1; }
// As attention that drops nothing: a seed that nobody has set.
std::tuple<Tensor, Tensor> Seeded(const Tensor& x) {
  return {x * 3, torch::full({}, drawn++, torch::kLong)};
}
Tensor ScaledSilently(const Tensor& x) { return x * 2; }

TORCH_LIBRARY(recomputed_units_test, m) {
  m.def("scaled_by_calls(Tensor x) -> Tensor");
  m.def("unsteady(Tensor x) -> Tensor");
  m.def("seeded(Tensor x) -> (Tensor, Tensor)");
  m.def("scaled_silently",
        torch::dispatch(c10::DispatchKey::CPU, TORCH_FN(ScaledSilently)));
}
TORCH_LIBRARY_IMPL(recomputed_units_test, CPU, m) {
  m.impl("scaled_by_calls", &ScaledByCalls);
  m.impl("unsteady", &Unsteady);
  m.impl("seeded", &Seeded);
}

// An operator's result that has other bits is kept, the rest is not.
TEST_F(RecomputedUnitsTest, KeepsWhatHasOtherBits) {
  const auto middle = [](const Tensor& h) {
    return h * Call("recomputed_units_test::unsteady", h.detach());
  };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
  const RecomputeReport report = ReportOf(middle);
  EXPECT_EQ(report.given_up, kBlocks);
  EXPECT_THAT(report.unable, IsEmpty());
  ASSERT_EQ(report.held.size(), static_cast<size_t>(kBlocks));
  const int64_t bytes = 4 * kDim * kTokens * 4;
  EXPECT_EQ(report.held[1],
            absl::StrCat("[blocks.1] keeps results that have other bits when "
                         "they are recomputed: recomputed_units_test::unsteady "
                         "(",
                         bytes, " bytes)"));
  EXPECT_EQ(report.given_up_bytes, ReportOf([](const Tensor& h) {
                                     return h * at::mul(h.detach(), 1);
                                   }).given_up_bytes -
                                       kBlocks * bytes);
}

struct SeededFunction : torch::autograd::Function<SeededFunction> {
  static Tensor forward(torch::autograd::AutogradContext* context,
                        const Tensor& x) {
    const auto [out, seed] =
        c10::Dispatcher::singleton()
            .findSchemaOrThrow("recomputed_units_test::seeded", "")
            .typed<decltype(Seeded)>()
            .call(x);
    context->save_for_backward({out, seed});
    context->saved_data["seed"] = seed.item<int64_t>();
    return out.sin();
  }
  static torch::autograd::tensor_list backward(
      torch::autograd::AutogradContext* context,
      const torch::autograd::tensor_list& gradients) {
    const auto saved = context->get_saved_variables();
    EXPECT_EQ(saved[1].item<int64_t>(), context->saved_data["seed"].toInt());
    return {gradients[0] * 3 * saved[0].cos()};
  }
};

// Where the numbers are the same the seed alone is kept.
TEST_F(RecomputedUnitsTest, KeepsASeedThatNobodySet) {
  const auto middle = [](const Tensor& h) { return SeededFunction::apply(h); };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
  const RecomputeReport report = ReportOf(middle);
  EXPECT_EQ(report.given_up, kBlocks);
  ASSERT_EQ(report.held.size(), static_cast<size_t>(kBlocks));
  EXPECT_THAT(report.held[0], HasSubstr("seeded (8 bytes)"));
}

TEST_F(RecomputedUnitsTest, KeepsAModuleThatWritesAgainWhatHasOtherBits) {
  const auto middle = [](const Tensor& h) {
    return h * Call("recomputed_units_test::unsteady", h.detach()).add_(1);
  };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
  const RecomputeReport report = ReportOf(middle);
  EXPECT_EQ(report.given_up, 0);
  ASSERT_EQ(report.unable.size(), static_cast<size_t>(kBlocks));
  EXPECT_THAT(report.unable[1], AllOf(HasSubstr("[blocks.1] the result of "),
                                      HasSubstr("unsteady has other bits")));
}

TEST_F(RecomputedUnitsTest, KeepsAModuleWithAnOperatorThatMayWrite) {
  const auto middle = [](const Tensor& h) {
    return h + Call("recomputed_units_test::scaled_silently", h.detach());
  };
  ExpectSameTraining([&](Trained& run) { SetMiddle(run, middle); });
  const RecomputeReport report = ReportOf(middle);
  ASSERT_EQ(report.unable.size(), static_cast<size_t>(kBlocks));
  EXPECT_THAT(report.unable[0],
              HasSubstr("scaled_silently does not say which of its arguments "
                        "it writes"));
}

TEST_F(RecomputedUnitsTest, KeepsAModuleThatWritesAParameter) {
  const auto prepare = [](Trained& run) {
    for (const auto& block : *run.net->blocks) {
      auto* const b = block->as<Block>();
      b->middle = [b](const Tensor& h) {
        torch::NoGradGuard no_grad;
        b->down->bias.mul_(0.5);
        torch::AutoGradMode grad(true);
        return h * 1;
      };
    }
  };
  ExpectSameTraining(prepare);
  Trained run("full");
  prepare(run);
  run.Step(Input(0));
  EXPECT_THAT(run.engine->last_step().recompute.unable,
              Contains(HasSubstr("mul_ writes a parameter")));
}

// Between steps, and gradients are on: that is no forward. The last block's are
// written last, the first one's used next.
TEST_F(RecomputedUnitsTest, FollowsAModuleWhoseParametersAreWrittenBetween) {
  std::vector<std::vector<Tensor>> states;
  for (const char* policy : {"", "full"}) {
    for (bool backwards : {false, true}) {
      Trained run(policy);
      for (int step = 0; step < 3; ++step) {
        run.Step(Input(step));
        std::vector<Tensor> parameters = run.net->parameters();
        if (backwards) std::reverse(parameters.begin(), parameters.end());
        for (const Tensor& p : parameters) p.data().clamp_(-0.2, 0.2);
        const RecomputeReport& report = run.engine->last_step().recompute;
        EXPECT_THAT(report.unable, IsEmpty());
        EXPECT_EQ(report.given_up, *policy == 0 ? 0 : kBlocks);
      }
      states.push_back(run.State());
    }
  }
  ExpectSameTensors(states[0], states[2]);
  ExpectSameTensors(states[1], states[3]);
}

// ---- what changes between forward and backward

// What a block has read is written after it: autograd, which saved nothing of
// it, allows that.
TEST_F(RecomputedUnitsTest, FollowsWritesToWhatItRead) {
  std::vector<std::vector<Tensor>> states;
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    Tensor mask;
    for (const auto& block : *run.net->blocks) {
      auto* const b = block->as<Block>();
      b->middle = [&mask](const Tensor& h) { return h.sigmoid() + mask; };
      b->last = [&mask](const Tensor& h) {
        mask.mul_(0.5);
        return h * 1;
      };
    }
    run.Create();
    for (int step = 0; step < 3; ++step) {
      mask = torch::ones({kTokens, 4 * kDim});  // not small
      run.Step(Input(step));
      EXPECT_EQ(run.engine->last_step().recompute.given_up,
                *policy == 0 ? 0 : kBlocks);
    }
    states.push_back(run.State());
  }
  ExpectSameTensors(states[0], states[1]);
}

TEST_F(RecomputedUnitsTest, ToldOfWritesToWhatIsSavedAsByLibtorch) {
  for (const char* policy : {"", "full"}) {
    Trained run(policy);
    Tensor kept;
    SetMiddle(run, [&](const Tensor& h) {
      kept = h.sigmoid();  // saves its result
      return kept * 2;
    });
    run.Create();
    run.Forward(Input(0));
    kept.detach().zero_();
    EXPECT_THAT(run.engine->Backward(run.loss).ToString(),
                HasSubstr("modified by an inplace operation"))
        << policy;
    // And goes on.
    SetMiddle(run, nullptr);
    run.Step(Input(1));
  }
}

}  // namespace
}  // namespace tessera
