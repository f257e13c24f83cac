// What a user can get wrong about the configuration, the module or the memory:
// the same one-line error on every rank, even if only one rank meets it, and
// the ranks stay usable.
#include <torch/torch.h>

#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

// args: the path for rank 0, for rank 1, and so on, one a line; the last one is
// for all further ranks.
TESSERA_RANK_FUNCTION(CreateFromFile) {
  const std::vector<std::string> paths = absl::StrSplit(args, '\n');
  const size_t mine = std::min<size_t>(world.rank(), paths.size() - 1);
  auto model = BuildModel("Mlp", world.rank());
  auto engine = Engine::Create(model, paths[mine]);
  // The communicator and the model are as before.
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("afterwards"));
  model->Loss(world.rank(), 0).backward();
  return engine.status().ToString();
}

std::vector<std::string> TextsOf(const RankPool::Answers& answers) {
  std::vector<std::string> texts;
  for (const auto& answer : answers) {
    texts.push_back(answer.ok() ? *answer : answer.status().ToString());
  }
  return texts;
}

class BadInputTest : public ::testing::TestWithParam<int> {
 protected:
  int world_size() const { return GetParam(); }

  std::string File(const std::string& name, const std::string& text) {
    const std::string path = folder_ / name;
    std::ofstream(path) << text;
    return path;
  }
  std::vector<std::string> Run(absl::string_view function,
                               absl::string_view args) {
    return TextsOf(
        RankPool::Get(world_size())->Run(function, args, absl::Seconds(30)));
  }
  // One line, with these words, on every rank.
  template <typename Matcher>
  void ExpectError(const std::string& path, const Matcher& matcher) {
    EXPECT_THAT(Run("CreateFromFile", path),
                Each(AllOf(matcher, Not(HasSubstr("\n")))));
  }
  const TempFolder folder_;
};

TEST_P(BadInputTest, AMissingFileIsNamed) {
  const std::string path = folder_ / "none.json";
  ExpectError(path, AllOf(StartsWith("NOT_FOUND"), HasSubstr(path)));
}

TEST_P(BadInputTest, AnUnknownStageIsNamedWithItsPlace) {
  const std::string path = File("stage.json", R"({
  "train_micro_batch_size_per_gpu": 1,
  "gradient_clipping": 0,
  "zero_optimization": {"stage": 4}
})");
  ExpectError(path,
              AllOf(StartsWith("INVALID_ARGUMENT"),
                    HasSubstr(absl::StrCat(path, ":4:34")),
                    HasSubstr("zero_optimization.stage"), HasSubstr("got 4")));
}

TEST_P(BadInputTest, AnUnknownKeyIsNamedWithTheNearestOne) {
  const std::string path = File("key.json", R"({
  "train_micro_batch_size_per_gpu": 1,
  "gradient_cliping": 0
})");
  ExpectError(path, AllOf(StartsWith("INVALID_ARGUMENT"),
                          HasSubstr(absl::StrCat(path, ":3:3")),
                          HasSubstr("gradient_cliping"),
                          HasSubstr("gradient_clipping")));
}

TEST_P(BadInputTest, ABatchThatTheWorldDoesNotDivideIsNamed) {
  const int batch = 5 * world_size() + 1;
  if (world_size() == 1) return;  // divides everything
  const std::string path =
      File("batch.json", absl::StrCat("{\"train_batch_size\": ", batch,
                                      ", \"gradient_clipping\": 0}"));
  ExpectError(path, AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr(path),
                          HasSubstr("train_batch_size"),
                          HasSubstr(absl::StrCat(batch))));
}

TEST_P(BadInputTest, BrokenTextIsNamedWithItsPlace) {
  const std::string path = File("broken.json", "{\"train_batch_size\": 4,, }");
  ExpectError(path, AllOf(StartsWith("INVALID_ARGUMENT"),
                          HasSubstr(absl::StrCat(path, ":1:24"))));
}

constexpr char kGood[] = R"({"train_micro_batch_size_per_gpu": 1,
  "gradient_clipping": 0, "zero_optimization": {"stage": 3}})";

TEST_P(BadInputTest, AFileThatOneRankLacksIsAnErrorOfAllRanks) {
  if (world_size() == 1) return;
  const std::string good = File("good.json", kGood);
  const std::string missing = folder_ / "none.json";
  ExpectError(
      absl::StrCat(good, "\n", missing),
      AllOf(HasSubstr("NOT_FOUND"), HasSubstr("rank 1"), HasSubstr(missing)));
  // The others do not matter: with the good one the ranks go on.
  EXPECT_THAT(Run("CreateFromFile", good), Each("OK"));
}

// ---- modules

struct OneParameter : torch::nn::Module {
  explicit OneParameter(at::Tensor tensor) {
    const bool trainable = !tensor.is_inference();
    register_parameter("layer_scale", std::move(tensor), trainable);
  }
};

// args: what is wrong on the last rank.
TESSERA_RANK_FUNCTION(CreateFromModule) {
  const bool last = world.rank() == world.world_size() - 1;
  at::Tensor tensor = torch::ones({7});
  if (last && args == "sparse") tensor = tensor.to_sparse();
  if (last && args == "negative") tensor = tensor._neg_view();
  if (last && args == "inference") {
    const c10::InferenceMode inference;
    tensor = torch::ones({7});
  }
  if (last && args == "strides") tensor = torch::ones({1}).expand({7});
  std::shared_ptr<torch::nn::Module> module =
      std::make_shared<OneParameter>(tensor);
  if (last && args == "null") module = nullptr;
  if (last && args == "more") {
    auto larger = std::make_shared<OneParameter>(tensor);
    for (int i = 0; i < 3; ++i) {
      larger->register_module(absl::StrCat("more", i),
                              std::make_shared<OneParameter>(torch::ones({7})));
    }
    module = larger;
  }
  if (last && args == "empty") module = std::make_shared<torch::nn::Module>();
  auto engine = MakeEngine(module, TrainingSpec(), world.communicator());
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("afterwards"));
  return engine.status().ToString();
}

TEST_P(BadInputTest, AParameterThatCannotBeShardedIsNamed) {
  EXPECT_THAT(Run("CreateFromModule", "sparse"),
              Each(AllOf(StartsWith("INVALID_ARGUMENT"),
                         HasSubstr("'layer_scale'"), HasSubstr("Sparse"))));
  EXPECT_THAT(Run("CreateFromModule", "strides"),
              Each(AllOf(StartsWith("INVALID_ARGUMENT"),
                         HasSubstr("'layer_scale'"), HasSubstr("strides"))));
  EXPECT_THAT(Run("CreateFromModule", "negative"),
              Each(AllOf(StartsWith("INVALID_ARGUMENT"),
                         HasSubstr("'layer_scale'"), HasSubstr("negative"))));
  EXPECT_THAT(
      Run("CreateFromModule", "inference"),
      Each(AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr("'layer_scale'"),
                 HasSubstr("InferenceMode"))));
}

TEST_P(BadInputTest, AModuleThatIsNoneIsRefused) {
  EXPECT_THAT(
      Run("CreateFromModule", "null"),
      Each(AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr("module is null"))));
  if (world_size() > 1) {
    EXPECT_THAT(Run("CreateFromModule", "more"),
                Each(AllOf(StartsWith("INVALID_ARGUMENT"),
                           HasSubstr("4 parameters on rank"),
                           HasSubstr("1 on rank 0"))));
  }
  EXPECT_THAT(Run("CreateFromModule", "empty"),
              Each(AllOf(StartsWith("INVALID_ARGUMENT"),
                         HasSubstr("has no parameters"))));
}

// ---- options

// args: what is wrong on the last rank.
TESSERA_RANK_FUNCTION(CreateWithOptions) {
  const bool last = world.rank() == world.world_size() - 1;
  EngineOptions options;
  options.communicator = world.communicator();
  proto::Config config = ConfigOf(TrainingSpec());
  if (last && args == "lr")
    config.mutable_optimizer()->mutable_params()->set_lr(0.5);
  auto engine = Engine::Create(std::make_shared<OneParameter>(torch::ones({7})),
                               config, options);
  TESSERA_RETURN_IF_ERROR(world.communicator()->Barrier("afterwards"));
  return engine.status().ToString();
}

TEST_P(BadInputTest, ConfigurationsThatDifferAreNamed) {
  if (world_size() == 1) return;
  EXPECT_THAT(
      Run("CreateWithOptions", "lr"),
      Each(AllOf(StartsWith("INVALID_ARGUMENT"), HasSubstr("configuration"),
                 HasSubstr(absl::StrCat("rank ", world_size() - 1)),
                 HasSubstr("lr: 0.5"))));
}

// ---- memory

// args: stage, and how many bytes more than now the last rank may hold.
TESSERA_RANK_FUNCTION(TrainWithLittleMemory) {
  const std::vector<std::string> words = absl::StrSplit(args, ' ');
  TrainingSpec spec;
  spec.stage = std::stoi(words.at(0));
  auto model = BuildModel("Mlp", world.rank());
  MemoryLedger& ledger = MemoryLedger::Host();
  const int64_t held = ledger.Report().total.current_bytes;
  if (world.rank() == world.world_size() - 1) {
    ledger.SetLimit(held + std::stoll(words.at(1)));
  }
  auto engine = MakeEngine(model, spec, world.communicator());
  const absl::Status status =
      engine.ok() ? (*engine)->Backward(model->Loss(world.rank(), 0))
                  : engine.status();
  ledger.SetLimit(MemoryLedger::kNoLimit);
  const char* where = engine.ok() ? "backward: " : "create: ";
  engine = absl::UnknownError("gone");
  return absl::StrCat(where, status.ToString());
}

// Bytes of parameters and optimizer.
TESSERA_RANK_FUNCTION(StateBytes) {
  auto model = BuildModel("Mlp", world.rank());
  TESSERA_ASSIGN_OR_RETURN(
      auto engine,
      MakeEngine(model, TrainingSpec::FromText(args), world.communicator()));
  const auto bytes = engine->state_bytes();
  return absl::StrCat(bytes.parameters + bytes.optimizer);
}

// Whatever is the first that does not fit, the module is what it was.
TESSERA_RANK_FUNCTION(CreateWithLittleMemory) {
  TrainingSpec spec = TrainingSpec::FromText(args);
  auto model = BuildModel("Mlp", world.rank());
  std::vector<at::Tensor> before;
  for (const at::Tensor& p : model->parameters()) before.push_back(p.clone());
  MemoryLedger& ledger = MemoryLedger::Host();
  const int64_t held = ledger.Report().total.current_bytes;
  int refusals = 0;
  for (int64_t bytes = 0;; bytes += 600) {
    if (world.rank() == world.world_size() - 1) ledger.SetLimit(held + bytes);
    auto engine = MakeEngine(model, spec, world.communicator());
    ledger.SetLimit(MemoryLedger::kNoLimit);
    if (engine.ok()) break;
    ++refusals;
    if (!absl::IsResourceExhausted(engine.status())) return engine.status();
    for (size_t i = 0; i < before.size(); ++i) {
      const at::Tensor p = model->parameters()[i];
      if (!at::equal(p, before[i]) || p.data_ptr() == nullptr) {
        return absl::InternalError(absl::StrCat("parameter ", i));
      }
    }
    if (ledger.Report().total.current_bytes != held) {
      return absl::InternalError("memory is still held");
    }
  }
  return absl::StrCat(refusals > 4 ? "given back" : "too few refusals");
}

TEST_P(BadInputTest, AFailedCreateGivesTheParametersBack) {
  for (int stage = 0; stage < 4; ++stage) {
    TrainingSpec spec;
    spec.stage = stage;
    EXPECT_THAT(Run("CreateWithLittleMemory", spec.ToText()),
                Each("given back"));
  }
}

TEST_P(BadInputTest, TooLittleMemoryAtCreateIsAnErrorOfAllRanks) {
  for (int stage = 0; stage < 4; ++stage) {
    EXPECT_THAT(Run("TrainWithLittleMemory", absl::StrCat(stage, " 1000")),
                Each(AllOf(StartsWith("create: RESOURCE_EXHAUSTED"),
                           HasSubstr("cannot allocate"))));
  }
}

// Enough for parameters and optimizer. At stage 0 there is none for gradients;
// at stage 3 none for the first gather, in the user's forward.
TEST_P(BadInputTest, TooLittleMemoryInAStepEndsAllRanks) {
  for (int stage : {0, 3}) {
    SCOPED_TRACE(stage);
    TrainingSpec spec;
    spec.stage = stage;
    const std::vector<std::string> needed = Run("StateBytes", spec.ToText());
    const std::vector<std::string> texts =
        Run("TrainWithLittleMemory", absl::StrCat(stage, " ", needed.back()));
    EXPECT_THAT(texts, Each(HasSubstr("cannot allocate")));
    for (size_t r = 0; r + 1 < texts.size(); ++r) {
      EXPECT_THAT(texts[r], HasSubstr(absl::StrCat("rank ", world_size() - 1)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, BadInputTest, ::testing::Values(1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("World", info.param);
                         });

}  // namespace
}  // namespace tessera
