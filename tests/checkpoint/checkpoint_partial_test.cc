// Loads parts of checkpoints: values alone, some parameters, by other names, of
// another model.
#include <torch/torch.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "checkpoint/exchange/name_map.h"
#include "checkpoint/exchange/rewrite.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "tests/checkpoint/checkpoint_partial_test_util.h"
#include "tests/checkpoint/checkpoint_state.h"
#include "tests/checkpoint/checkpoint_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// `args` is "<spec>\n<folder>\n<option>\n<option>". An option is "model_only",
// "lenient", "only <pattern>" or "rule <of a NameMap>"; "rank 1: <option>" is
// for rank 1 only.
absl::StatusOr<LoadCheckpointOptions> OptionsOf(absl::string_view args,
                                                int rank) {
  const std::vector<std::string> lines = absl::StrSplit(args, '\n');
  LoadCheckpointOptions options;
  std::string rules;
  for (size_t i = 2; i < lines.size(); ++i) {
    std::string line = lines[i];
    if (absl::StartsWith(line, "rank 1: ")) {
      if (rank != 1) continue;
      line = line.substr(8);
    }
    if (line == "model_only") options.model_only = true;
    if (line == "lenient") options.strict = false;
    if (absl::StartsWith(line, "only ")) options.only.push_back(line.substr(5));
    if (absl::StartsWith(line, "rule ")) {
      absl::StrAppend(&rules, line.substr(5), "\n");
    }
  }
  TESSERA_ASSIGN_OR_RETURN(options.names, NameMap::Parse(rules, "rules"));
  return options;
}

// Makes one step of another run, then loads; returns the state before, the
// report, and the state after.
TESSERA_RANK_FUNCTION(TrainAndLoadPart) {
  const CheckpointArgs a(args);
  at::set_num_threads(1);
  torch::manual_seed(99);
  auto model = MakeTestModel(a.spec.model);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TrainingSpec one_step = a.spec;
  one_step.steps = 1;
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, one_step, world.rank(), 0, &record));
  TESSERA_ASSIGN_OR_RETURN(const std::string before, StateOf(*engine, *model));
  TESSERA_ASSIGN_OR_RETURN(const LoadCheckpointOptions options,
                           OptionsOf(args, world.rank()));
  const auto loaded = engine->LoadCheckpoint(a.dir, options);
  std::string said = loaded.status().ToString();
  if (loaded.ok()) {
    said =
        absl::StrCat("missing: ", absl::StrJoin(loaded->missing, " "),
                     "; unexpected: ", absl::StrJoin(loaded->unexpected, " "));
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string after, StateOf(*engine, *model));
  // Training on is part of the test.
  TrainingSpec more = a.spec;
  more.steps = static_cast<int>(engine->step()) + 1;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, more, world.rank(), more.steps - 1, &record));
  return absl::StrCat(before, kCut, said, kCut, after);
}

TEST_P(PartialTest, TheModelAlone) {
  const State saved = Save("Gpt");
  const Loaded got = Load("Gpt", {"model_only"});
  EXPECT_EQ(got.said, "missing: ; unexpected: ");
  ExpectFrom(saved, got, [](const std::string& key) {
    return absl::EndsWith(key, " value") ? key : "";
  });
}

// The other optimizer's states have the same names and other values, or the
// same names and another kind.
TEST_P(PartialTest, TheModelAloneIntoAnotherOptimizer) {
  const State saved = Save("Gpt");
  for (const char* optimizer :
       {"type:'AdamW',params{amsgrad:true}",
        "type:'AdamW',params{ema_decay:0.5}", "type:'Lamb'"}) {
    spec_.optimizer = optimizer;
    Loaded got = Load("Gpt", {});
    EXPECT_THAT(got.said, HasSubstr("LoadCheckpointOptions::model_only loads"));
    EXPECT_EQ(got.after, got.before);
    got = Load("Gpt", {"model_only"});
    EXPECT_EQ(got.said, "missing: ; unexpected: ") << optimizer;
    ExpectFrom(saved, got, [](const std::string& key) {
      return absl::EndsWith(key, " value") ? key : "";
    });
  }
}

// The model goes through safetensors, which hold no more than that.
TEST_P(PartialTest, TheModelImported) {
  const State saved = Save("Gpt");
  TESSERA_ASSERT_OK(ExportSafetensors(dir_ + "Gpt", dir_ + "st", {}, nullptr,
                                      FileSystem::Real()));
  TESSERA_ASSERT_OK(ImportSafetensors(dir_ + "st", dir_ + "Imported", NameMap(),
                                      nullptr, FileSystem::Real()));
  Loaded got = Load("Imported", {});
  EXPECT_THAT(got.said, HasSubstr("holds no optimizer states"));
  EXPECT_EQ(got.after, got.before);
  got = Load("Imported", {"model_only"});
  ExpectFrom(saved, got, [](const std::string& key) {
    return absl::EndsWith(key, " value") ? key : "";
  });
}

TEST_P(PartialTest, SomeParameters) {
  const State saved = Save("Gpt");
  const Loaded got = Load("Gpt", {"only blocks.1", "only *norm2.weight"});
  EXPECT_EQ(got.said, "missing: ; unexpected: ");
  ExpectFrom(saved, got, [](const std::string& key) {
    return absl::StartsWith(key, "blocks.1.") ||
                   absl::StrContains(key, "norm2.weight ") || key == "step"
               ? key
               : "";
  });
}

TEST_P(PartialTest, ByOtherNames) {
  const State saved = Save("Gpt");
  const Loaded got = Load("Gpt", {"rule blocks.0.qkv.* blocks.1.qkv.*",
                                  "rule blocks.1.qkv.* blocks.0.qkv.*"});
  EXPECT_EQ(got.said, "missing: ; unexpected: ");
  ExpectFrom(saved, got, [](std::string key) {
    if (absl::StrContains(key, ".qkv.")) key[7] = key[7] == '0' ? '1' : '0';
    return key;
  });
}

TEST_P(PartialTest, OfAnotherModel) {
  const State saved = Save("Mlp");
  spec_.model = "Gpt";  // has a module `blocks`, too
  Loaded got = Load("Mlp", {});
  EXPECT_THAT(got.said, AllOf(StartsWith("FAILED_PRECONDITION"),
                              HasSubstr("it lacks 'places'"),
                              HasSubstr("which the module lacks")));
  EXPECT_EQ(got.after, got.before);
  got = Load("Mlp", {"only norm.bias", "rule norm.bias in.bias"});
  EXPECT_THAT(got.said, HasSubstr("'in.bias' is [13] there, [14] here"));
  EXPECT_EQ(got.after, got.before);
}

TEST_P(PartialTest, WhatOnlyOneHasIsNamed) {
  const State saved = Save("Gpt");
  const std::string stranger = "rule blocks.1.up.weight elsewhere";
  Loaded got = Load("Gpt", {stranger});
  EXPECT_THAT(got.said,
              HasSubstr("it lacks 'blocks.1.up.weight'; holds "
                        "'blocks.1.up.weight', which the module lacks"));
  EXPECT_EQ(got.after, got.before);
  const auto not_that = [](const std::string& key) {
    return absl::StartsWith(key, "blocks.1.up.weight ") ? "" : key;
  };
  got = Load("Gpt", {stranger, "lenient"});
  EXPECT_EQ(got.said,
            "missing: blocks.1.up.weight; unexpected: blocks.1.up.weight");
  ExpectFrom(saved, got, not_that);
  got = Load("Gpt", {"rule blocks.1.up.weight -", "lenient"});
  EXPECT_EQ(got.said, "missing: ; unexpected: blocks.1.up.weight");
  ExpectFrom(saved, got, not_that);
}

TEST_P(PartialTest, OptionsThatMeanNothing) {
  Save("Gpt");
  Loaded got = Load("Gpt", {"only blocks.2"});
  EXPECT_THAT(got.said,
              AllOf(StartsWith("INVALID_ARGUMENT"),
                    HasSubstr("LoadCheckpointOptions::only: 'blocks.2' is not "
                              "a parameter; expected names as of "
                              "named_parameters()")));
  EXPECT_EQ(got.after, got.before);
  got = Load("Gpt", {"rank 1: only blocks.0"});
  EXPECT_THAT(got.said,
              HasSubstr("the part of the checkpoint to load differs between "));
  EXPECT_EQ(got.after, got.before);
  got = Load("Gpt", {"rank 1: model_only"});
  EXPECT_THAT(got.said,
              HasSubstr("the part of the checkpoint to load differs between "));
  EXPECT_EQ(got.after, got.before);
  got = Load("Gpt", {"rule places places transposed"});
  EXPECT_THAT(got.said, HasSubstr("'places' cannot be transposed"));
  EXPECT_EQ(got.after, got.before);
}

TEST_P(PartialTest, WhatSharesMemoryIsLoadedTogether) {
  Save("SharedStorage");
  Loaded got = Load("SharedStorage", {"only weight"});
  EXPECT_THAT(got.said, AllOf(HasSubstr("'weight' shares memory with '"),
                              HasSubstr("load both or neither")));
  EXPECT_EQ(got.after, got.before);
  got = Load("SharedStorage", {"rule head -", "lenient"});
  EXPECT_THAT(got.said, HasSubstr("shares memory with 'head'"));
  EXPECT_EQ(got.after, got.before);
}

// Loads a part of its own state, which it has.
TESSERA_RANK_FUNCTION(TrainSaveAndLoadPart) {
  const CheckpointArgs a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TrainingSpec before = a.spec;
  before.steps = 2;
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, before, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(a.dir));
  LoadCheckpointOptions options;
  options.only = {"blocks.1"};
  TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(a.dir, options).status());
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), before.steps, &record));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  return ToText(record);
}

TEST_P(PartialTest, OfItsOwnChangesNothing) {
  ExpectOracle(Run("TrainSaveAndLoadPart", 4), spec_, 4, 0);
}

INSTANTIATE_TEST_SUITE_P(Stages, PartialTest, ::testing::Values(1, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

}  // namespace
}  // namespace tessera
