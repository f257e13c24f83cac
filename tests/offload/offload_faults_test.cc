// Tests what goes wrong with the disk below an engine when it is created: if a
// folder is none, or has no room, all ranks return one clear error, and the
// module is unchanged. Also tests two jobs in one folder. Later faults are in
// offload_loss_test.cc.
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/offload/wide_trainee.h"
#include "tests/support/rank_pool.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

// ---- Create is refused

// Frozen parameters that are converted come back rounded, offload or not.
TrainingSpec InFloat32() {
  TrainingSpec spec = OnDisk();
  spec.dtype = "fp32";
  return spec;
}

// The module of a Create that failed, against one that no engine has seen.
std::string WhatHasChanged(const std::shared_ptr<WideModel>& module, int rank) {
  const auto fresh = WideModelOf(rank);
  const std::vector<at::Tensor> expected = fresh->parameters();
  const std::vector<at::Tensor> got = module->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (!got[i].equal(expected[i])) return absl::StrCat("value ", i);
  }
  fresh->Loss(rank, 0).backward();
  torch::manual_seed(700 + static_cast<uint64_t>(rank));
  module->Loss(rank, 0).backward();
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i].requires_grad() &&
        !got[i].grad().equal(expected[i].grad())) {
      return absl::StrCat("gradient ", i);
    }
  }
  return OpenSwapFiles().empty() ? "nothing" : "a swap file is open";
}

// args: "<folder>|<bytes>|<rank>|<spec>". Create where no file of this rank
// (-1: of any) may have more bytes; "OK" or its error, and what it has changed.
TESSERA_RANK_FUNCTION(CreateWithin) {
  const std::vector<std::string> parts = absl::StrSplit(args, '|');
  const auto spec = TrainingSpec::FromText(parts[3]);
  const auto module = WideModelOf(world.rank());
  absl::Status created;
  {
    rlimit before{};
    getrlimit(RLIMIT_FSIZE, &before);
    rlimit limit = before;
    const int rank = std::stoi(parts[2]);
    if (rank < 0 || rank == world.rank()) {
      limit.rlim_cur = std::stoull(parts[1]);
    }
    setrlimit(RLIMIT_FSIZE, &limit);
    const auto restore =
        absl::MakeCleanup([&] { setrlimit(RLIMIT_FSIZE, &before); });
    auto t =
        Trainee::Make(module, ConfigIn(parts[0], spec), world.communicator());
    created = t.status();
    if (t.ok()) return std::string("OK");
  }
  return absl::StrCat(created.ToString(), "\n",
                      WhatHasChanged(module, world.rank()));
}

std::vector<std::string> Create(const std::string& folder,
                                const std::string& bytes, int rank,
                                const TrainingSpec& spec = InFloat32()) {
  return RunOnRanks(
      2, "CreateWithin",
      absl::StrCat(folder, "|", bytes, "|", rank, "|", spec.ToText()));
}
constexpr char kUnlimited[] = "1000000000000";

TEST(OffloadCreateTest, AFolderThatIsNoneIsNamedOnAllRanks) {
  const TempFolder folder;
  std::ofstream(folder / "file") << "a file";
  for (const std::string& path :
       {folder / "file", folder / "file/below", std::string("/dev/full"),
        std::string("/proc/self"), std::string("/sys/kernel")}) {
    EXPECT_THAT(
        Create(path, kUnlimited, -1),
        Each(AllOf(HasSubstr("offload_optimizer.nvme_path"), HasSubstr(path),
                   HasSubstr("rank 0"), ::testing::EndsWith("\nnothing"))))
        << path;
  }
  TrainingSpec parameters = InFloat32();
  parameters.states_on_disk = -1;
  EXPECT_THAT(Create("/dev/full", kUnlimited, -1, parameters),
              Each(HasSubstr("offload_param.nvme_path")));
  EXPECT_THAT(NamesIn(folder.path()), ElementsAre("file"));
}

// Whatever is the first that finds no room, on one rank or on all.
TEST(OffloadCreateTest, WithoutRoomTheModuleIsWhatItWas) {
  const TempFolder folder;
  for (const int rank : {1, -1}) {
    int refused = 0;
    bool created = false;
    for (int64_t bytes = 4096; !created; bytes = bytes * 5 / 3) {
      SCOPED_TRACE(absl::StrCat(bytes, " bytes of rank ", rank));
      const auto said = Create(folder.path(), absl::StrCat(bytes), rank);
      created = said[0] == "OK";
      if (created) break;
      ++refused;
      ASSERT_THAT(
          said,
          Each(AllOf(StartsWith("RESOURCE_EXHAUSTED"), HasSubstr("of unit"),
                     HasSubstr(folder.path()), HasSubstr("cannot have"),
                     HasSubstr("rank"), ::testing::EndsWith("\nnothing"))));
    }
    EXPECT_GE(refused, 5);
    EXPECT_THAT(Create(folder.path(), kUnlimited, rank), Each("OK"));
  }
  EXPECT_THAT(NamesIn(folder.path()), ElementsAre());
}

// args: "<folder>|<bytes>|<spec>": there is a file system of so many bytes.
TESSERA_RANK_FUNCTION(CreateOnASmallDisk) {
  const std::vector<std::string> parts = absl::StrSplit(args, '|');
  const int home = open("/proc/thread-self/ns/mnt", O_RDONLY | O_CLOEXEC);
  const auto back = absl::MakeCleanup([&] {
    (void)setns(home, CLONE_NEWNS);
    close(home);
  });
  if (unshare(CLONE_NEWNS | CLONE_FS) != 0 ||
      mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      mount("small", parts[0].c_str(), "tmpfs", 0,
            absl::StrCat("size=", parts[1]).c_str()) != 0) {
    return std::string("may not mount");
  }
  const auto module = WideModelOf(world.rank());
  const auto t = Trainee::Make(
      module, ConfigIn(parts[0], TrainingSpec::FromText(parts[2])),
      world.communicator());
  if (t.ok()) return std::string("OK");
  return absl::StrCat(t.status().ToString(), "\n",
                      WhatHasChanged(module, world.rank()));
}

TEST(OffloadCreateTest, AFullDiskIsSaidWithWhatItHas) {
  const TempFolder folder;
  const auto create = [&](int64_t bytes) {
    return RunOnRanks(
        2, "CreateOnASmallDisk",
        absl::StrCat(folder.path(), "|", bytes, "|", InFloat32().ToText()));
  };
  const auto said = create(200 << 10);
  if (said[0] == "may not mount") GTEST_SKIP() << said[0];
  EXPECT_THAT(
      said,
      Each(AllOf(StartsWith("RESOURCE_EXHAUSTED"), HasSubstr("No space left"),
                 HasSubstr("bytes left"), ::testing::EndsWith("\nnothing"))));
  EXPECT_THAT(create(50 << 20), Each("OK"));
}

// ---- several in a folder

// args: "<folder>|<seeds>|<spec>". An engine of each seed, whose steps
// alternate; the values of all. Folder "": no disk.
TESSERA_RANK_FUNCTION(TrainSeveral) {
  const std::vector<std::string> parts = absl::StrSplit(args, '|');
  std::vector<Trainee> all;
  for (absl::string_view seed : absl::StrSplit(parts[1], ' ')) {
    TESSERA_ASSIGN_OR_RETURN(
        Trainee t,
        MakeWideIn(parts[0], TrainingSpec::FromText(parts[2]),
                   world.communicator(), static_cast<uint64_t>(seed[0])));
    all.push_back(std::move(t));
  }
  Record record;
  for (int step = 0; step < 4; ++step) {
    for (Trainee& t : all) {
      torch::manual_seed(static_cast<uint64_t>(step));
      TESSERA_RETURN_IF_ERROR(TrainWide(&t, step, step + 1, &record));
    }
  }
  record.clear();
  for (Trainee& t : all) {
    TESSERA_RETURN_IF_ERROR(AddValues(&t, &record));
    TESSERA_RETURN_IF_ERROR(t.engine->Close());
  }
  return ToText(record);
}

std::string Several(const std::string& folder, const std::string& seeds) {
  TrainingSpec spec = OnDisk();
  if (folder.empty()) spec.states_on_disk = spec.parameters_in_memory = -1;
  return absl::StrCat(folder, "|", seeds, "|", spec.ToText());
}

TEST(OffloadFolderTest, EnginesAndJobsShareOne) {
  const TempFolder folder;
  const auto a = RunOnRanks(2, "TrainSeveral", Several("", "a"));
  const auto b = RunOnRanks(2, "TrainSeveral", Several("", "b"));
  ASSERT_THAT(a, Each(StartsWith("parameter")));
  const auto both =
      RunOnRanks(2, "TrainSeveral", Several(folder.path(), "a b"));
  for (size_t r = 0; r < 2; ++r) EXPECT_EQ(both[r], a[r] + "\n" + b[r]);
  // Two jobs at once: the ranks of two pools.
  RankPool other(RankPoolOptions{});
  for (const auto& started : other.Run("TrainSeveral", Several("", "a"))) {
    ASSERT_TRUE(started.ok()) << started.status();
  }
  RankPool::Answers theirs;
  std::thread job([&] {
    theirs = other.Run("TrainSeveral", Several(folder.path(), "b b b"));
  });
  const auto ours =
      RunOnRanks(2, "TrainSeveral", Several(folder.path(), "a a a"));
  job.join();
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(ours[r], absl::StrCat(a[r], "\n", a[r], "\n", a[r]));
    ASSERT_TRUE(theirs[r].ok()) << theirs[r].status();
    EXPECT_EQ(*theirs[r], absl::StrCat(b[r], "\n", b[r], "\n", b[r]));
  }
  EXPECT_THAT(NamesIn(folder.path()), ElementsAre());
}

TEST(OffloadFolderTest, WhatAKilledJobLeftGoesAndNothingElse) {
  const TempFolder folder;
  const auto put = [&](const char* name, int minutes) {
    std::ofstream(folder / name) << "bytes";
    std::filesystem::last_write_time(
        folder / name, std::filesystem::file_time_type::clock::now() -
                           std::chrono::minutes(minutes));
  };
  put("tessera-swap-a1b2c3", 5);
  put("tessera-swap-d4e5f6", 0);  // perhaps just being made
  put("tessera-swap-notes.txt", 5);
  put("model.pt", 5);
  EXPECT_THAT(Create(folder.path(), kUnlimited, -1), Each("OK"));
  EXPECT_THAT(NamesIn(folder.path()),
              UnorderedElementsAre("tessera-swap-d4e5f6",
                                   "tessera-swap-notes.txt", "model.pt"));
}

}  // namespace
}  // namespace tessera
