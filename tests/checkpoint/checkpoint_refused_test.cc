// Checkpoints are damaged, of another run, or different on the ranks. Whatever
// is wrong with a folder is found on all ranks before anything changes.
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/format/manifest.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "tests/checkpoint/checkpoint_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

TESSERA_RANK_FUNCTION(LoadFails) {
  CheckpointArgs a(args);
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

// Returns what loading says of each folder after the first two lines, one line
// each, and the record of training that continues as if none had been tried.
TESSERA_RANK_FUNCTION(LoadsFail) {
  const CheckpointArgs a(args);
  const std::vector<std::string> lines = absl::StrSplit(args, '\n');
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TrainingSpec spec = a.spec;
  spec.steps = 1;
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, spec, world.rank(), 0, &record));
  std::string statuses;
  for (size_t i = 2; i < lines.size(); ++i) {
    absl::StrAppend(&statuses,
                    engine->LoadCheckpoint(lines[i]).status().ToString(), "\n");
  }
  spec.steps = 2;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, spec, world.rank(), 1, &record));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return absl::StrCat(statuses, ToText(record));
}

// A checkpoint's folder that is damaged, and what loading and verifying it say.
struct Damaged {
  std::string name;
  std::function<void(const std::string& dir)> damage;
  ::testing::Matcher<std::string> told;
};

class DamagedFoldersTest : public CheckpointTest {
 protected:
  // Copies of the folder, each damaged in its own way, are all refused on all
  // ranks, by `tessera checkpoint verify` too, and nothing changes.
  void ExpectAllRefused(const std::vector<Damaged>& cases) {
    std::string dirs = dir_;
    for (const Damaged& c : cases) {
      const std::string dir = absl::StrCat(folder_ / "damaged ", c.name);
      fs::copy(dir_, dir, fs::copy_options::recursive);
      c.damage(dir);
      absl::StrAppend(&dirs, "\n", dir);
      auto reader = CheckpointReader::Open(dir, FileSystem::Real());
      EXPECT_THAT(
          (reader.ok() ? reader->Verify(2) : reader.status()).ToString(),
          c.told)
          << c.name;
    }
    spec_.steps = 2;
    std::vector<std::string> answers =
        RunOn(kWorldSize, "LoadsFail", spec_, dirs);
    for (std::string& answer : answers) {
      for (const Damaged& c : cases) {
        const size_t end = answer.find('\n');
        EXPECT_THAT(answer.substr(0, end), c.told) << c.name;
        answer = end == std::string::npos ? "" : answer.substr(end + 1);
      }
    }
    ExpectOracle(answers, spec_, 2, 0);
  }
};

TEST_P(DamagedFoldersTest, FilesThatAreOthersOrNone) {
  Run("TrainAndSave", 2);
  const std::string other = folder_ / "other";
  spec_.steps = 3;
  RunOn(kWorldSize, "TrainAndSave", spec_, other);
  const uint64_t other_id =
      CheckpointReader::Open(other, FileSystem::Real())->manifest().id();
  const std::string data[] = {DataFile(0), DataFile(1)};
  const auto another_index = [&](int rank) {
    return AllOf(HasSubstr("DATA_LOSS"), HasSubstr(data[rank]),
                 AnyOf(HasSubstr("its index, bytes "), HasSubstr(" has ")));
  };
  std::vector<Damaged> cases = {
      {"exchanged",
       [&](const std::string& dir) {
         fs::rename(dir + "/" + data[0], dir + "/x");
         fs::rename(dir + "/" + data[1], dir + "/" + data[0]);
         fs::rename(dir + "/x", dir + "/" + data[1]);
       },
       AnyOf(another_index(0), another_index(1))},
      {"data of another",
       [&](const std::string& dir) {
         fs::copy(other + "/" + DataFileName(other_id, 1), dir + "/" + data[1],
                  fs::copy_options::overwrite_existing);
       },
       another_index(1)},
      {"manifest of another",
       [&](const std::string& dir) {
         fs::copy(other + "/manifest", dir + "/manifest",
                  fs::copy_options::overwrite_existing);
       },
       AllOf(HasSubstr("DATA_LOSS"), HasSubstr(DataFileName(other_id, 0)),
             HasSubstr("a part of the checkpoint"))},
      {"cut off",
       [&](const std::string& dir) {
         fs::resize_file(dir + "/" + data[1], 100);
       },
       AllOf(HasSubstr("DATA_LOSS"), HasSubstr(data[1]),
             HasSubstr("; bytes 100 to "),
             HasSubstr(absl::StrCat("'", FirstTensorOf(1), "'")))},
  };
  const std::pair<const char*, std::function<int(const char*)>> kinds[] = {
      {"FIFO", [](const char* path) { return mkfifo(path, 0600); }},
      {"folder", [](const char* path) { return mkdir(path, 0700); }},
      // A device file can be made only where that is allowed.
      {"device",
       [](const char* path) {
         const int made = mknod(path, S_IFCHR | 0600, makedev(1, 5));
         return made < 0 ? mkfifo(path, 0600) : made;
       }},
      {"link to a device",
       [](const char* path) { return symlink("/dev/zero", path); }},
      {"link to nothing",
       [](const char* path) { return symlink("/nowhere/at/all", path); }},
  };
  for (const auto& [kind, make] : kinds) {
    const std::string what = std::string(kind) == "link to nothing"
                                 ? "a symbolic link that leads to nothing"
                                 : "no regular file";
    for (const std::string& name : {data[1], std::string("manifest")}) {
      cases.push_back({absl::StrCat(kind, " for ", name),
                       [&make = make, name](const std::string& dir) {
                         const std::string path = dir + "/" + name;
                         fs::rename(path, path + ".real");
                         ASSERT_EQ(make(path.c_str()), 0);
                       },
                       AllOf(HasSubstr("DATA_LOSS"),
                             HasSubstr(absl::StrCat(name, ": is ", what)),
                             HasSubstr(name == "manifest"
                                           ? ", so the checkpoint that it was "
                                             "of is lost"
                                           : ": a part of the checkpoint"))});
    }
  }
  ExpectAllRefused(cases);
}

INSTANTIATE_TEST_SUITE_P(All, DamagedFoldersTest, ::testing::Values(0, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

TEST_P(CheckpointTest, ACorruptedByteOfAnyStateIsDataLossThatNamesIt) {
  Run("TrainAndSave", 2);
  const proto::CheckpointManifest manifest = Manifest();
  ASSERT_EQ(manifest.files_size(), kWorldSize);
  const Folder folder = Folder::Open(dir_, FileSystem::Real()).value();
  const proto::CheckpointIndex index =
      DataFileReader::Open(folder, manifest, 1)->ReadIndex(manifest).value();
  std::vector<std::string> states;
  for (const proto::CheckpointPiece& piece : index.pieces()) {
    const proto::CheckpointStorage& storage =
        manifest.storages(piece.storage());
    const std::string state = storage.states(piece.state()).name();
    if (std::count(states.begin(), states.end(), state) > 0) continue;
    states.push_back(state);
    const int64_t bytes = (piece.end() - piece.begin()) * 4;
    const int64_t block = (bytes - 1) / kBlockBytes * kBlockBytes;
    FlipByte(DataFile(1), piece.offset() + bytes - 1);
    ExpectRefused(AllOf(
        HasSubstr("DATA_LOSS"), HasSubstr(DataFile(1)),
        HasSubstr(absl::StrCat("'", state, "' of '", storage.tensors(0).name(),
                               "', bytes ", piece.offset() + block, " to ",
                               piece.offset() + bytes))));
    FlipByte(DataFile(1), piece.offset() + bytes - 1);
  }
  EXPECT_THAT(states, ::testing::UnorderedElementsAre("value", "exp_avg",
                                                      "exp_avg_sq"));
  FlipByte(DataFile(1), manifest.files(1).index_offset());
  ExpectRefused(AllOf(HasSubstr("DATA_LOSS"), HasSubstr(DataFile(1)),
                      HasSubstr("index")));
  FlipByte(DataFile(1), manifest.files(1).index_offset());
  // The unchanged file loads.
  ExpectOracle(Run("LoadAndTrain", 4), spec_, 4, 2);
}

TEST_P(CheckpointTest, WhatIsCutOffOrMissingIsNamed) {
  Run("TrainAndSave", 2);
  const std::string name = DataFile(1);
  const std::string manifest = dir_ + "/manifest";

  fs::resize_file(dir_ + "/" + name, 100);
  ExpectRefused(AllOf(HasSubstr("DATA_LOSS"), HasSubstr(name),
                      HasSubstr("has 100 bytes")));
  fs::remove(dir_ + "/" + name);
  ExpectRefused(AllOf(HasSubstr("DATA_LOSS"), HasSubstr("No such file"),
                      HasSubstr(name)));
  fs::create_directory(dir_ + "/" + name);
  ExpectRefused(AllOf(HasSubstr("no regular file"), HasSubstr(name)));
  std::ofstream(manifest) << "format_version: 0 wrld_size";
  ExpectRefused(AllOf(HasSubstr("DATA_LOSS"), HasSubstr(manifest),
                      HasSubstr("is no manifest")));
  fs::remove(manifest);
  ExpectRefused(AllOf(HasSubstr("NOT_FOUND"), HasSubstr(dir_)));
  fs::remove_all(dir_);
  ExpectRefused(AllOf(HasSubstr("NOT_FOUND"), HasSubstr(dir_)));
}

TEST_P(CheckpointTest, AnotherModelIsRefusedByName) {
  Run("TrainAndSave", 2);
  TrainingSpec other = spec_;
  other.model = "Mlp";
  EXPECT_THAT(RunOn(2, "LoadFails", other, dir_),
              Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                         HasSubstr("of another model: it lacks '"),
                         HasSubstr("which the module lacks"))));
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
  const CheckpointArgs a(args);
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
      Each(AllOf(HasSubstr("FAILED_PRECONDITION"),
                 HasSubstr("'layer.weight' is [7, 5] there, [5, 7] here"))));
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
  const CheckpointArgs a(args);
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
  const CheckpointArgs a(args);
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

}  // namespace
}  // namespace tessera
