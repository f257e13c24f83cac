// Safetensors files whose names are others, or that hold one parameter of the
// model twice.
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "checkpoint/write_safetensors_test_util.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/checkpoint/safetensors_load_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

// A file of another naming, of which only a part is this model's.
TESSERA_RANK_FUNCTION(LoadMapped) {
  const auto [path, spec] = Split(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  LoadSafetensorsOptions options;
  options.prefix = "model.";
  // Every name maps to another one; the file has the tied parameter only under
  // the second of its names.
  options.file_name = [](absl::string_view name) {
    return absl::StrCat("x_", name);
  };
  options.strict = false;
  TESSERA_ASSIGN_OR_RETURN(const LoadSafetensorsReport report,
                           t.engine->LoadSafetensors(path, options));
  std::string said;
  for (const std::string& name : report.missing) {
    absl::StrAppend(&said, "missing ", name, "\n");
  }
  for (const std::string& name : report.unexpected) {
    absl::StrAppend(&said, "unexpected ", name, "\n");
  }
  TESSERA_ASSIGN_OR_RETURN(const StateDict dict, t.engine->FullStateDict());
  for (const auto& [name, value] : dict) {
    if (value.eq(7).all().item<bool>()) absl::StrAppend(&said, name, " is 7\n");
  }
  return said;
}

TEST(LoadNamesTest, PrefixesMapsAndSecondNames) {
  const TempFolder folder;
  torch::manual_seed(kFileSeed);
  const auto module = MakeTestModel("Tied");
  const auto parameters = module->named_parameters();
  // The tied one, under its last name; the first parameter; a stranger; what
  // begins otherwise.
  std::vector<std::string> tied;
  for (const auto& a : parameters) {
    for (const auto& b : parameters) {
      if (a.key() < b.key() && a.value().is_same(b.value())) {
        tied = {a.key(), b.key()};
      }
    }
  }
  ASSERT_EQ(tied.size(), 2);
  const at::Tensor sevens = torch::full_like(parameters[tied[0]], 7).detach();
  TESSERA_ASSERT_OK(WriteSafetensors(
      folder / "m", {{"model.x_" + tied[1], sevens},
                     {"model.lm_head", torch::ones({1})},
                     {"vision.x_" + tied[0], torch::ones({1})}}));
  std::string expected;
  for (const auto& p : parameters) {
    if (p.key() == tied[0] || p.key() == tied[1]) continue;
    absl::StrAppend(&expected, "missing ", p.key(), "\n");
  }
  absl::StrAppend(&expected, "unexpected model.lm_head\n");
  for (const auto& p : parameters) {
    if (p.key() != tied[0] && p.key() != tied[1]) continue;
    absl::StrAppend(&expected, p.key(), " is 7\n");
  }
  for (const int stage : {0, 3}) {
    TrainingSpec spec;
    spec.model = "Tied";
    spec.stage = stage;
    EXPECT_THAT(
        RunOnRanks(2, "LoadMapped", absl::StrCat(folder / "m|", spec.ToText())),
        Each(expected));
  }
}

// Returns "loaded", the names that were reported, and the tied parameter's
// value.
TESSERA_RANK_FUNCTION(LoadTied) {
  const auto [path, spec] = Split(args);
  TESSERA_ASSIGN_OR_RETURN(Trainee t,
                           Trainee::Make(spec, world.communicator()));
  LoadSafetensorsOptions options;
  options.strict = !absl::EndsWith(path, "lenient");
  TESSERA_ASSIGN_OR_RETURN(
      const LoadSafetensorsReport report,
      t.engine->LoadSafetensors(
          std::string(absl::StripSuffix(path, ".lenient")), options));
  TESSERA_ASSIGN_OR_RETURN(const StateDict dict, t.engine->FullStateDict());
  std::string said = absl::StrCat("loaded", report.missing.empty() ? "" : "?");
  for (const std::string& name : report.unexpected) {
    absl::StrAppend(&said, " without ", name);
  }
  for (const auto& [name, value] : dict) {
    if (name != "encoder.weight") continue;
    absl::StrAppend(&said, ", it has ", value.flatten()[-1].item<float>());
  }
  return said;
}

// A file may hold what is one parameter here twice.
TEST(LoadTiedTest, TwoValuesOfOneParameterAreRefused) {
  const TempFolder folder;
  StateDict dict;
  torch::manual_seed(kFileSeed);
  for (const auto& p : MakeTestModel("Tied")->named_parameters()) {
    dict.emplace_back(p.key(), p.value().detach().clone());
  }
  const auto write = [&](const std::string& file,
                         const std::function<at::Tensor(at::Tensor)>& second) {
    StateDict written = dict;
    for (auto& [name, value] : written) {
      if (!absl::EndsWith(name, "coder.weight")) continue;
      value = torch::full_like(value, 7);
      if (name == "decoder.weight") value = second(value);
    }
    TESSERA_ASSERT_OK(WriteSafetensors(folder / file, written));
  };
  write("equal", [](at::Tensor t) { return t; });
  write("last", [](at::Tensor t) {  // the last rank's part
    t.flatten()[-1] = 8;
    return t;
  });
  write("bits", [](at::Tensor t) {
    t.view(torch::kInt).flatten()[0].bitwise_xor_(1);
    return t;
  });
  write("sizes", [](at::Tensor t) { return t.flatten().clone(); });
  write("dtype", [](at::Tensor t) { return t.to(torch::kBFloat16); });
  for (const int stage : {0, 3}) {
    TrainingSpec spec;
    spec.model = "Tied";
    spec.stage = stage;
    const auto load = [&](const std::string& name) {
      return RunOnRanks(2, "LoadTied",
                        absl::StrCat(folder / name, "|", spec.ToText()));
    };
    EXPECT_THAT(load("equal"), Each("loaded, it has 7"));
    for (const char* name : {"last", "bits", "sizes", "dtype"}) {
      EXPECT_THAT(load(name),
                  Each(AllOf(HasSubstr("INVALID_ARGUMENT"),
                             HasSubstr("tensor 'encoder.weight'"),
                             HasSubstr("'decoder.weight'"),
                             HasSubstr("one tensor in the module (tied)"))))
          << name;
      EXPECT_THAT(load(absl::StrCat(name, ".lenient")),
                  Each("loaded without decoder.weight, it has 7"))
          << name;
      EXPECT_THAT(RankPool::Get(2)->stderr_of(0),
                  HasSubstr("the first is loaded: "));
    }
  }
}

}  // namespace
}  // namespace tessera
