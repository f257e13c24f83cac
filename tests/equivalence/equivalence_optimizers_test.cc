// Every optimizer on every number of ranks and at every stage: the bits are the
// oracle's, whose steps are its own (verify/oracle_step.h).
//
//   22 optimizers x stage {0, 1, 2, 3} x W {1, 2} x parameters {fp32, bf16}
//   x one group or four x states {fp32, bf16 but where there is none}
//   x gradients {fp32, bf16} x plainly, or accumulated and clipped
//   x masters {fp32, of bf16 parameters bf16, of fp16 ones fp16 but where they
//   are always fp32, fp32 in two halves beside bf16}
//
// 88 cells in which every pair of values occurs.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

struct Optimizer {
  const char* type;
  const char* params;
  const char* of_group;  // what one group has of its own
};
const std::vector<Optimizer> kOptimizers = {
    {"AdamW", "lr:0.01", "betas:[0.8,0.9],maximize:true"},
    {"AdamW", "lr:0.01,amsgrad:true", "eps:0.001"},
    {"AdamW", "lr:0.01,bias_correction:false,maximize:true",
     "bias_correction:true"},
    {"Adam", "lr:0.01,adam_w_mode:false", "betas:[0.3,0.9]"},
    {"Adam", "lr:0.01,adam_w_mode:false,amsgrad:true", "maximize:true"},
    {"SGD", "lr:0.1", "maximize:true"},
    {"SGD", "lr:0.1,momentum:0.9,dampening:0.3", "momentum:0.5"},
    {"SGD", "lr:0.1,momentum:0.9,nesterov:true", "nesterov:false"},
    {"Adagrad", "lr:0.01,lr_decay:0.1,initial_accumulator_value:0.1",
     "lr_decay:0.5,eps:0.01"},
    {"RMSprop", "lr:0.01", "alpha:0.5"},
    {"RMSprop", "lr:0.01,momentum:0.9", "momentum:0.2"},
    {"RMSprop", "lr:0.01,centered:true", "alpha:0.5"},
    {"RMSprop", "lr:0.01,centered:true,momentum:0.9,maximize:true",
     "eps:0.001"},
    {"Lion", "lr:0.01", "betas:[0.5,0.6]"},
    {"Lamb", "lr:0.01", "betas:[0.5,0.6],max_coeff:0.5"},
    {"Muon", "lr:0.01,adam_lr:0.002", "betas:[0.5,0.6]"},
    {"Muon", "lr:0.01,ns_method:'standard',nesterov:false,ns_steps:3",
     "eps:0.001"},
    {"Muon", "lr:0.01,adjust_lr_fn:'match_rms_adamw',maximize:true",
     "betas:[0.5,0.6]"},
    {"AdamWScheduleFree", "lr:0.01", "betas:[0.5,0.9],weight_lr_power:0"},
    {"AdamWScheduleFree", "lr:0.01,r:0.5,maximize:true", "r:2,eps:0.001"},
    {"Adafactor", "lr:0.01", "eps2:0.1,d:2"},
    {"Adafactor", "lr:1,eps:0.01,beta2_decay:-0.5,maximize:true",
     "beta2_decay:-1,eps:0.1"}};

// Returns groups for Mlp: norms, a frozen layer, biases of the rest, and all
// others.
std::string GroupsOf(const Optimizer& optimizer) {
  return absl::StrCat(
      ",param_groups{modules:'LayerNorm',params{lr:0.02,", optimizer.of_group,
      "}},param_groups{name:'still',parameters:'blocks.1.up.*',frozen:true},"
      "param_groups{parameters:'blocks.*.down.weight',params{weight_decay:0}},"
      "no_decay:'auto'");
}

bool HasNarrowMasters(const Optimizer& optimizer) {
  const absl::string_view type = optimizer.type;
  return type != "Lamb" && type != "Muon" && type != "AdamWScheduleFree" &&
         type != "Adafactor";
}

std::string TextOf(const Optimizer& optimizer, bool groups, bool narrow) {
  const absl::string_view type = optimizer.type;
  narrow = narrow && type != "AdamWScheduleFree" && type != "Adafactor";
  return absl::StrCat("type:'", type, "',params{weight_decay:0.1,",
                      optimizer.params, narrow ? ",state_dtype:'bf16'}" : "}",
                      groups ? GroupsOf(optimizer) : "");
}

const Choice kAxes = {kOptimizers.size(), 4, 2, 2, 2, 2, 2, 2, 4};

TrainingSpec SpecOf(const Choice& choice) {
  TrainingSpec spec;
  spec.steps = 4;
  spec.stage = static_cast<int>(choice[1]);
  spec.dtype = choice[3] == 0 ? "fp32" : "bf16";
  spec.optimizer =
      TextOf(kOptimizers[choice[0]], choice[4] == 1, choice[5] == 1);
  if (choice[6] == 1) {
    spec.accumulation = 2;
    spec.clipping = 0.3;
  }
  spec.gradient_dtype = choice[7] == 1 ? "bf16" : "";
  spec.remainder_masters = choice[3] == 1 && choice[8] == 3;
  if (choice[3] == 1 && choice[8] > 0 && choice[8] < 3 &&
      HasNarrowMasters(kOptimizers[choice[0]])) {
    spec.narrow_masters = true;
    spec.dtype = choice[8] == 1 ? "bf16" : "fp16";
    spec.initial_scale_power = 10;
  }
  spec.gradients = true;
  spec.poison = true;
  return spec;
}

class OptimizersTest : public ::testing::TestWithParam<size_t> {};

TEST_P(OptimizersTest, IsTheOracles) {
  static const std::vector<Choice> cells = Pairwise(kAxes, 88);
  int run = 0;
  for (const Choice& choice : cells) {
    if (choice[0] != GetParam()) continue;
    ExpectEqualsOracle(SpecOf(choice), static_cast<int>(choice[2]) + 1);
    ++run;
    if (HasFailure()) return;  // one difference is enough to read
  }
  EXPECT_GT(run, 3);
}

INSTANTIATE_TEST_SUITE_P(All, OptimizersTest,
                         ::testing::Range(size_t{0}, kOptimizers.size()),
                         [](const auto& info) {
                           return absl::StrCat(kOptimizers[info.param].type,
                                               info.param);
                         });

// An element's random bits depend on its place in the parameter, for parameters
// in another order than that of their indices, at odd places of a storage, of
// several names, of complex numbers.
TEST(OptimizersTest, RandomBitsAreOfPlacesInMemory) {
  for (const char* model : {"ConvNorm", "SharedStorage", "Tied", "Complex"}) {
    for (const int stage : {1, 3}) {
      TrainingSpec spec;
      spec.model = model;
      spec.stage = stage;
      spec.optimizer = TextOf(kOptimizers[0], false, /*narrow=*/true);
      for (const int world_size : {1, 2}) ExpectEqualsOracle(spec, world_size);
      spec.dtype = "bf16";
      spec.fp32_norms = true;
      spec.narrow_masters = true;
      spec.optimizer = TextOf(kOptimizers[0], false, /*narrow=*/false);
      ExpectEqualsOracle(spec, 2);
    }
  }
}

// Rows and columns follow indices, for parameters whose memory is in another
// order, at odd places of a storage, of several names.
TEST(OptimizersTest, RowsAndColumnsAreOfIndices) {
  for (const char* model : {"ConvNorm", "SharedStorage", "Tied"}) {
    for (const int stage : {1, 3}) {
      TrainingSpec spec;
      spec.model = model;
      spec.stage = stage;
      spec.optimizer = TextOf(kOptimizers[18], false, /*narrow=*/false);
      for (const int world_size : {1, 3}) ExpectEqualsOracle(spec, world_size);
    }
  }
}

// Parameters are float64 and float32; states of the former stay float64.
TEST(OptimizersTest, OfFloat64) {
  for (const Optimizer& optimizer : kOptimizers) {
    for (const bool groups : {false, true}) {
      TrainingSpec spec;
      spec.model = "MixedDtype";
      spec.stage = 2;
      spec.optimizer = TextOf(optimizer, false, /*narrow=*/true);
      if (groups) {
        absl::StrAppend(&spec.optimizer,
                        ",param_groups{parameters:'shift',params{",
                        optimizer.of_group, "}}");
      }
      ExpectEqualsOracle(spec, 2);
    }
  }
}

// A parameter that gets no gradient in a step keeps its states and its count.
TEST(OptimizersTest, WhatHasNoGradientIsNotStepped) {
  for (const size_t optimizer : {0u, 6u, 8u, 13u, 18u}) {
    TrainingSpec spec;
    spec.model = "ChangingRank";
    spec.steps = 4;
    spec.stage = 3;
    spec.optimizer = TextOf(kOptimizers[optimizer], false, /*narrow=*/true);
    ExpectEqualsOracle(spec, 2);
  }
}

}  // namespace
}  // namespace tessera
