// Checkpoints of two ranks: a resumed run is the one that did not stop, to the
// bit; whatever is wrong with a folder is found on all ranks before anything
// changes.
#include <signal.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "checkpoint/manifest.pb.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "google/protobuf/text_format.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr int kWorldSize = 2;

// "<spec>\n<folder>".
struct Args {
  explicit Args(absl::string_view text) {
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    spec = TrainingSpec::FromText(lines.at(0));
    dir = lines.at(1);
  }
  TrainingSpec spec;
  std::string dir;
};

std::string ClientState(int rank) {
  return absl::StrCat("position ", rank, std::string("\0\n", 2), "end");
}

absl::Status SaveCheckpoint(Engine& engine, const std::string& dir, int rank) {
  return engine.SaveCheckpoint(dir, ClientState(rank));
}

// ---- resuming

TESSERA_RANK_FUNCTION(TrainAndSave) {
  const Args a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(SaveCheckpoint(*engine, a.dir, world.rank()));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  return ToText(record);
}

// From other values and another generator than those that were saved.
TESSERA_RANK_FUNCTION(LoadAndTrain) {
  const Args a(args);
  at::set_num_threads(1);
  torch::manual_seed(99);
  auto model = MakeTestModel(a.spec.model);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TESSERA_ASSIGN_OR_RETURN(std::string client, engine->LoadCheckpoint(a.dir));
  if (client != ClientState(world.rank())) {
    return absl::InternalError(absl::StrCat("client state '", client, "'"));
  }
  Record record;
  TESSERA_RETURN_IF_ERROR(TrainSteps(*engine, *model, a.spec, world.rank(),
                                     static_cast<int>(engine->step()),
                                     &record));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  return ToText(record);
}

class CheckpointTest : public ::testing::TestWithParam<int> {
 protected:
  CheckpointTest() {
    spec_.model = "Attention";  // dropout: the generator's state matters
    spec_.stage = GetParam();
  }

  std::vector<std::string> RunOn(int world_size, absl::string_view function,
                                 const TrainingSpec& spec,
                                 const std::string& dir) {
    std::vector<std::string> texts;
    for (auto& answer :
         RankPool::Get(world_size)
             ->Run(function, absl::StrCat(spec.ToText(), "\n", dir),
                   absl::Seconds(40))) {
      texts.push_back(answer.ok() ? *answer : answer.status().ToString());
    }
    return texts;
  }
  std::vector<std::string> Run(absl::string_view function, int steps) {
    spec_.steps = steps;
    return RunOn(kWorldSize, function, spec_, dir_);
  }

  // The oracle's record of `steps` steps, from step `first` on.
  static Record Expected(TrainingSpec spec, int steps, int first, int rank) {
    spec.steps = steps;
    Record record;
    for (const std::string& line : TrainWithOracle(spec, kWorldSize)[rank]) {
      bool before = false;
      for (int step = 0; step < first; ++step) {
        before |= absl::StartsWith(line, absl::StrCat("step ", step, ","));
      }
      if (!before) record.push_back(line);
    }
    return record;
  }
  static void ExpectOracle(const std::vector<std::string>& answers,
                           const TrainingSpec& spec, int steps, int first) {
    for (int rank = 0; rank < kWorldSize; ++rank) {
      EXPECT_EQ(FirstDifference(Expected(spec, steps, first, rank),
                                RecordFromText(answers[rank])),
                "")
          << "rank " << rank;
    }
  }

  proto::CheckpointManifest ReadManifest() {
    proto::CheckpointManifest manifest;
    EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
        ReadWholeFile(dir_ + "/manifest.textproto").value(), &manifest));
    return manifest;
  }
  void FlipByte(const std::string& file, int64_t at) {
    std::fstream stream(dir_ + "/" + file,
                        std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(at);
    const char byte = static_cast<char>(stream.get());
    stream.seekp(at);
    stream.put(static_cast<char>(byte ^ 1));
    ASSERT_TRUE(stream.good());
  }
  // Loading is refused on all ranks with these words, and nothing changes.
  template <typename Matcher>
  void ExpectRefused(const Matcher& matcher) {
    std::vector<std::string> answers = Run("LoadFails", 2);
    for (std::string& answer : answers) {
      const size_t end = answer.find('\n');
      EXPECT_THAT(answer.substr(0, end), matcher);
      answer = end == std::string::npos ? "" : answer.substr(end + 1);
    }
    ExpectOracle(answers, spec_, 2, 0);
  }

  const TempFolder folder_;
  std::string dir_ = folder_ / "ckpt";
  TrainingSpec spec_;
};

TEST_P(CheckpointTest, AResumedRunIsTheOneThatDidNotStop) {
  for (int accumulation : {1, 2}) {
    SCOPED_TRACE(accumulation);
    spec_.accumulation = accumulation;
    ExpectOracle(Run("TrainAndSave", 2), spec_, 2, 0);
    ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
    EXPECT_FALSE(fs::exists(dir_ + ".tmp"));
  }
}

// Step counts of their own, and a parameter that was never stepped.
TEST_P(CheckpointTest, AResumedRunKeepsWhichParametersWereSkipped) {
  spec_.model = "ChangingRank";
  ExpectOracle(Run("TrainAndSave", 2), spec_, 2, 0);
  ExpectOracle(Run("LoadAndTrain", 6), spec_, 6, 2);
}

// ---- folders that are not what they should be

TESSERA_RANK_FUNCTION(LoadFails) {
  Args a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  Record record;
  a.spec.steps = 1;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  const absl::Status status = engine->LoadCheckpoint(a.dir).status();
  a.spec.steps = 2;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 1, &record));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(status.ToString(), "\n", ToText(record));
}

TEST_P(CheckpointTest, ACorruptedByteOfAnyChunkIsDataLossThatNamesIt) {
  Run("TrainAndSave", 2);
  const proto::CheckpointManifest manifest = ReadManifest();
  ASSERT_EQ(manifest.files_size(), kWorldSize);
  const proto::CheckpointFile& file = manifest.files(1);
  std::vector<std::string> kinds;
  for (const auto& chunk : file.chunks()) {
    const std::string kind = chunk.name().substr(0, chunk.name().find('/'));
    if (!kinds.empty() && kinds.back() == kind) continue;
    kinds.push_back(kind);
    const int64_t at = chunk.offset_bytes() + chunk.bytes() - 1;
    FlipByte(file.name(), at);
    ExpectRefused(AllOf(HasSubstr("DATA_LOSS"), HasSubstr("rank 1"),
                        HasSubstr(absl::StrCat("'", chunk.name(), "'")),
                        HasSubstr(file.name())));
    FlipByte(file.name(), at);
  }
  EXPECT_THAT(kinds, ::testing::IsSupersetOf({"parameters", "exp_avg",
                                              "exp_avg_sq", "parameter_steps",
                                              "rng", "client_state"}));
  // And as it was written, it loads.
  ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
}

TEST_P(CheckpointTest, WhatIsCutOffOrMissingIsNamed) {
  Run("TrainAndSave", 2);
  const proto::CheckpointManifest manifest = ReadManifest();
  const std::string file = dir_ + "/" + manifest.files(1).name();
  const std::string text = dir_ + "/manifest.textproto";

  fs::resize_file(file, 100);
  ExpectRefused(AllOf(HasSubstr("DATA_LOSS"), HasSubstr("rank 1"),
                      HasSubstr(manifest.files(1).name())));
  fs::remove(file);
  ExpectRefused(AllOf(HasSubstr("rank 1"), HasSubstr("No such file"),
                      HasSubstr(manifest.files(1).name())));
  std::ofstream(text) << "format_version: 0 wrld_size";
  ExpectRefused(AllOf(HasSubstr("DATA_LOSS"), HasSubstr(text)));
  fs::remove(text);
  ExpectRefused(AllOf(HasSubstr("NOT_FOUND"), HasSubstr(text)));
  fs::remove_all(dir_);
  ExpectRefused(AllOf(HasSubstr("NOT_FOUND"), HasSubstr(dir_)));
}

TEST_P(CheckpointTest, AnotherStageModelOrWorldSizeIsRefusedByName) {
  Run("TrainAndSave", 2);
  auto refused_by = [&](const TrainingSpec& spec, int world_size) {
    return RunOn(world_size, "LoadFails", spec, dir_);
  };
  TrainingSpec other = spec_;
  other.stage = (spec_.stage + 1) % 4;
  EXPECT_THAT(
      refused_by(other, 2),
      Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                 HasSubstr(absl::StrCat("ZeRO stage ", spec_.stage,
                                        ", this run has ", other.stage)))));
  other = spec_;
  other.model = "Mlp";
  EXPECT_THAT(refused_by(other, 2), Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                                               HasSubstr("the model"))));
  EXPECT_THAT(refused_by(spec_, 3),
              Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                         HasSubstr("world size 2, this run has 3"))));
}

// Two layers, of 5 to 7 features or of 7 to 5: as many bytes either way.
struct TwoWays : torch::nn::Module {
  TwoWays(int in, int out) {
    register_module(
        "layer",
        torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false)));
  }
};

TESSERA_RANK_FUNCTION(LoadAnotherShape) {
  const Args a(args);
  torch::manual_seed(1);
  TESSERA_ASSIGN_OR_RETURN(auto saver,
                           MakeEngine(std::make_shared<TwoWays>(5, 7), a.spec,
                                      world.communicator()));
  TESSERA_RETURN_IF_ERROR(saver->SaveCheckpoint(a.dir));
  TESSERA_ASSIGN_OR_RETURN(auto loader,
                           MakeEngine(std::make_shared<TwoWays>(7, 5), a.spec,
                                      world.communicator()));
  return loader->LoadCheckpoint(a.dir).status().ToString();
}

TEST_P(CheckpointTest, AnotherShapeOfAsManyBytesIsRefused) {
  EXPECT_THAT(
      Run("LoadAnotherShape", 1),
      Each(AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("the model"))));
}

// A parameter beside a module of its name: two units are called "a".
struct TwoOfAName : torch::nn::Module {
  explicit TwoOfAName(float value) {
    register_parameter("a", torch::full({16}, value));
    for (const char* name : {"a", "b"}) {
      auto child = register_module(name, std::make_shared<TwoWays>(4, 4));
      torch::NoGradGuard no_grad;
      for (const at::Tensor& p : child->parameters()) p.fill_(-value);
    }
  }
};

TESSERA_RANK_FUNCTION(LoadTwoOfAName) {
  const Args a(args);
  auto saved = std::make_shared<TwoOfAName>(3.f);
  TESSERA_ASSIGN_OR_RETURN(auto saver,
                           MakeEngine(saved, a.spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(saver->SaveCheckpoint(a.dir));
  auto loaded = std::make_shared<TwoOfAName>(5.f);
  TESSERA_ASSIGN_OR_RETURN(auto loader,
                           MakeEngine(loaded, a.spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(loader->LoadCheckpoint(a.dir).status());
  TESSERA_RETURN_IF_ERROR(loader->Close());
  std::string sums;
  for (const at::Tensor& p : loaded->parameters()) {
    absl::StrAppend(&sums, p.sum().item<float>(), " ");
  }
  return sums;
}

TEST_P(CheckpointTest, UnitsOfOneNameKeepTheirValues) {
  EXPECT_THAT(Run("LoadTwoOfAName", 1), Each("48 -48 -48 "));
}

TESSERA_RANK_FUNCTION(LoadOneEach) {
  const Args a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(a.dir + "0"));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(engine->SaveCheckpoint(a.dir + "1"));
  return engine->LoadCheckpoint(absl::StrCat(a.dir, world.rank()))
      .status()
      .ToString();
}

TEST_P(CheckpointTest, RanksThatLoadDifferentOnesAreTold) {
  EXPECT_THAT(Run("LoadOneEach", 1),
              Each(AllOf(HasSubstr("INVALID_ARGUMENT"),
                         HasSubstr(absl::StrCat("rank 0 (", dir_, "0")),
                         HasSubstr(absl::StrCat("rank 1 (", dir_, "1")))));
}

// ---- saving

TEST_P(CheckpointTest, ALeftoverTemporaryFolderIsNoObstacle) {
  fs::create_directories(dir_ + ".tmp");
  std::ofstream(dir_ + ".tmp/rank-00001.bin") << "half a checkpoint";
  Run("TrainAndSave", 2);
  ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
  EXPECT_FALSE(fs::exists(dir_ + ".tmp"));
}

TEST_P(CheckpointTest, SavingOverACheckpointReplacesItWhole) {
  Run("TrainAndSave", 1);
  std::ofstream(dir_ + "/rank-00007.bin") << "of the old one";
  Run("TrainAndSave", 2);
  ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
  EXPECT_FALSE(fs::exists(dir_ + "/rank-00007.bin"));
  EXPECT_FALSE(fs::exists(dir_ + ".tmp"));
}

// Until its end no file of this process may grow beyond `bytes`: a full disk,
// for root too.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() { setrlimit(RLIMIT_FSIZE, &before_); }

 private:
  rlimit before_{};
};

// Saves after one step; then rank 1 cannot.
TESSERA_RANK_FUNCTION(SaveFailsOnRank1) {
  Args a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  Record record;
  a.spec.steps = 2;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 0, &record));
  TESSERA_RETURN_IF_ERROR(SaveCheckpoint(*engine, a.dir, world.rank()));
  a.spec.steps = 3;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, a.spec, world.rank(), 2, &record));
  absl::Status status;
  if (world.rank() == 1) {
    FullDisk full(1000);
    status = SaveCheckpoint(*engine, a.dir, world.rank());
  } else {
    status = SaveCheckpoint(*engine, a.dir, world.rank());
  }
  return status.ToString();
}

TEST_P(CheckpointTest, ASaveThatFailsOnOneRankLeavesTheOldCheckpoint) {
  EXPECT_THAT(Run("SaveFailsOnRank1", 3),
              Each(AllOf(HasSubstr("rank 1"), HasSubstr("rank-00001.bin"),
                         HasSubstr("File too large"))));
  EXPECT_FALSE(fs::exists(dir_ + ".tmp"));
  ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
}

TEST_P(CheckpointTest, AFolderThatCannotBeMadeIsNamed) {
  std::ofstream(folder_ / "file") << "not a folder";
  dir_ = folder_ / "file/ckpt";
  EXPECT_THAT(Run("TrainAndSave", 1), Each(HasSubstr(dir_)));
  dir_ = folder_ / "file";
  EXPECT_THAT(Run("TrainAndSave", 1),
              Each(AllOf(HasSubstr("ALREADY_EXISTS"), HasSubstr(dir_))));
  EXPECT_EQ(ReadWholeFile(folder_ / "file").value(), "not a folder");
}

TESSERA_RANK_FUNCTION(SaveInTheMiddleOfAStep) {
  Args a(args);
  a.spec.accumulation = 2;
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(engine->Backward(model->Loss(world.rank(), 0)));
  const absl::Status after_backward = engine->SaveCheckpoint(a.dir);
  TESSERA_RETURN_IF_ERROR(engine->Step());
  const absl::Status after_step = engine->SaveCheckpoint(a.dir);
  return absl::StrCat(after_backward.ToString(), "\n", after_step.ToString());
}

TEST_P(CheckpointTest, SavingInTheMiddleOfAStepIsRefused) {
  const std::string refused =
      "FAILED_PRECONDITION: [SaveCheckpoint] rank 0: in the middle of a step";
  EXPECT_THAT(
      Run("SaveInTheMiddleOfAStep", 1),
      Each(AllOf(HasSubstr(refused), HasSubstr(absl::StrCat("\n", refused)))));
  EXPECT_FALSE(fs::exists(dir_));
}

INSTANTIATE_TEST_SUITE_P(All, CheckpointTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

// All stages at once, since new processes cost half a second.
class NewProcessesTest : public CheckpointTest {};

TEST_P(NewProcessesTest, ResumeToTheSameBits) {
  const std::string parent = dir_;
  for (int stage = 0; stage < 4; ++stage) {
    spec_.stage = stage;
    dir_ = absl::StrCat(parent, stage);
    ExpectOracle(Run("TrainAndSave", 2), spec_, 2, 0);
  }
  RankPool::EndAll();
  for (int stage = 0; stage < 4; ++stage) {
    spec_.stage = stage;
    dir_ = absl::StrCat(parent, stage);
    ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
  }
}

INSTANTIATE_TEST_SUITE_P(AllStages, NewProcessesTest, ::testing::Values(0),
                         [](const auto&) { return "AtOnce"; });

}  // namespace
}  // namespace tessera
