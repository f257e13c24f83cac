// Loads checkpoints in runs whose optimizer has other options: states that it
// lacks begin then.
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "tests/checkpoint/checkpoint_partial_test_util.h"
#include "tests/checkpoint/checkpoint_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

// args: "<spec>\n<folder>\n<optimizer>\n<states of both>\n<states of it
// alone>". Loads the other's checkpoint in a run with that optimizer; returns
// what is wrong.
TESSERA_RANK_FUNCTION(GoOnWithOtherOptions) {
  const CheckpointArgs a(args);
  const std::vector<std::string> lines = absl::StrSplit(args, '\n');
  const std::vector<std::string> both =
      absl::StrSplit(lines.at(3), ' ', absl::SkipEmpty());
  const std::vector<std::string> late =
      absl::StrSplit(lines.at(4), ' ', absl::SkipEmpty());
  at::set_num_threads(1);
  std::map<std::string, at::Tensor> saved;
  Record record;
  {
    torch::manual_seed(5);
    auto model = MakeTestModel(a.spec.model);
    TESSERA_ASSIGN_OR_RETURN(auto engine,
                             MakeEngine(model, a.spec, world.communicator()));
    TESSERA_RETURN_IF_ERROR(
        TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
    TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(a.dir));
    for (const auto& item : model->named_parameters()) {
      TESSERA_ASSIGN_OR_RETURN(saved[item.key()], engine->Master(item.key()));
      for (const std::string& state : both) {
        TESSERA_ASSIGN_OR_RETURN(saved[absl::StrCat(item.key(), " ", state)],
                                 engine->OptimizerStateOf(item.key(), state));
      }
    }
  }
  torch::manual_seed(99);
  auto model = MakeTestModel(a.spec.model);
  TrainingSpec spec = a.spec;
  spec.optimizer = lines.at(2);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, world.communicator()));
  std::string said = engine->LoadCheckpoint(a.dir).status().ToString();
  LoadCheckpointOptions lenient;
  lenient.strict = false;
  TESSERA_ASSIGN_OR_RETURN(const LoadCheckpointReport report,
                           engine->LoadCheckpoint(a.dir, lenient));
  size_t expected = 0;
  for (const auto& item : model->named_parameters()) {
    const std::string& name = item.key();
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor value, engine->Master(name));
    if (!value.equal(saved.at(name))) absl::StrAppend(&said, "\n", name);
    for (const std::string& state : both) {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor now,
                               engine->OptimizerStateOf(name, state));
      const std::string key = absl::StrCat(name, " ", state);
      if (!now.equal(saved.at(key))) absl::StrAppend(&said, "\n", key);
    }
    for (const std::string& state : late) {
      TESSERA_ASSIGN_OR_RETURN(const at::Tensor now,
                               engine->OptimizerStateOf(name, state));
      if (!now.equal(state == "ema" ? value : torch::zeros_like(value))) {
        absl::StrAppend(&said, "\n", name, " ", state);
      }
      const std::string told = absl::StrCat(name, " (", state, ")");
      expected +=
          std::count(report.missing.begin(), report.missing.end(), told);
    }
  }
  const size_t all = model->named_parameters().size() * late.size();
  if (expected != all || report.missing.size() != all) {
    absl::StrAppend(&said, "\nmissing: ", absl::StrJoin(report.missing, ", "));
  }
  if (engine->step() != a.spec.steps) absl::StrAppend(&said, "\nstep");
  spec.steps = a.spec.steps + 1;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, spec, world.rank(), a.spec.steps, &record));
  return said;
}

// An option that is turned on, or off, in a run.
TEST_P(PartialTest, OptionsThatAreTurnedOnInARun) {
  struct Case {
    const char *saved, *loaded, *both, *late;
    bool same = false;  // nothing is said of it
  };
  const Case cases[] = {
      {"type:'AdamW'", "type:'AdamW',params{ema_decay:0.5}",
       "exp_avg exp_avg_sq", "ema"},
      {"type:'AdamW'", "type:'AdamW',params{amsgrad:true}",
       "exp_avg exp_avg_sq", "max_exp_avg_sq"},
      {"type:'Adam'", "type:'Adam',params{amsgrad:true,ema_decay:0.9}",
       "exp_avg exp_avg_sq", "max_exp_avg_sq ema"},
      {"type:'RMSprop'", "type:'RMSprop',params{momentum:0.9,centered:true}",
       "square_avg", "grad_avg momentum_buffer"},
      {"type:'SGD',params{momentum:0.5}",
       "type:'SGD',params{momentum:0.9,ema_decay:0.5}", "momentum_buffer",
       "ema"},
      // Without any states these begin as in a new run.
      {"type:'SGD'", "type:'SGD',params{momentum:0.9}", "", ""},
      {"type:'AdamW',params{amsgrad:true}", "type:'AdamW'",
       "exp_avg exp_avg_sq", ""},
      {"type:'AdamW',params{ema_decay:0.5}", "type:'AdamW'",
       "exp_avg exp_avg_sq", "", true},
  };
  spec_.model = "Mlp";
  for (const Case& one : cases) {
    SCOPED_TRACE(absl::StrCat(one.saved, " to ", one.loaded));
    spec_.optimizer = one.saved;
    const auto said = RunOn(kWorldSize, "GoOnWithOtherOptions", spec_,
                            absl::StrCat(dir_, "turned\n", one.loaded, "\n",
                                         one.both, "\n", one.late));
    if (one.same) {
      EXPECT_THAT(said, Each("OK"));
      continue;
    }
    EXPECT_THAT(said,
                Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                           HasSubstr("LoadCheckpointOptions::strict = "
                                     "false"),
                           HasSubstr("begin now"), Not(HasSubstr("\n")))));
  }
}

}  // namespace
}  // namespace tessera
