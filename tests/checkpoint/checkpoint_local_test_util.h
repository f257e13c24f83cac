// CheckpointLocalTest runs ranks on hosts that have folders of their own. A
// host is a working folder here: ranks name the same path, and see different
// folders.
#ifndef TESTS_CHECKPOINT_CHECKPOINT_LOCAL_TEST_UTIL_H_
#define TESTS_CHECKPOINT_CHECKPOINT_LOCAL_TEST_UTIL_H_

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "checkpoint/disk/folder.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gtest/gtest.h"
#include "tests/support/temp_folder.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {

// "<spec>\n<folders of the ranks' hosts, with blanks between>\n<words>".
struct Args {
  explicit Args(absl::string_view text) {
    const std::vector<std::string> lines = absl::StrSplit(text, '\n');
    spec = TrainingSpec::FromText(lines.at(0));
    hosts = absl::StrSplit(lines.at(1), ' ');
    words = absl::StrSplit(lines.at(2), ' ');
  }
  bool Has(const std::string& word) const {
    return std::find(words.begin(), words.end(), word) != words.end();
  }
  TrainingSpec spec;
  std::vector<std::string> hosts;
  std::vector<std::string> words;
};

// While it lives this rank is on that host.
class OnHost {
 public:
  explicit OnHost(const std::string& folder)
      : before_(std::filesystem::current_path().string()) {
    std::filesystem::create_directories(folder);
    TESSERA_CHECK(chdir(folder.c_str()) == 0) << folder;
  }
  ~OnHost() { TESSERA_CHECK(chdir(before_.c_str()) == 0) << before_; }

 private:
  const std::string before_;
};

inline absl::StatusOr<std::unique_ptr<Engine>> LocalEngine(
    const Args& a, std::shared_ptr<TestModel> model, const World& world) {
  proto::Config config = ConfigOf(a.spec);
  config.mutable_checkpoint()->set_use_node_local_storage(!a.Has("options"));
  config.mutable_checkpoint()->set_replicas(a.Has("replicas"));
  config.mutable_checkpoint()->set_async(a.Has("async"));
  EngineOptions options;
  options.communicator = world.communicator();
  return Engine::Create(std::move(model), config, options);
}

class CheckpointLocalTest : public ::testing::TestWithParam<int> {
 protected:
  CheckpointLocalTest() {
    spec_.model = "Gpt";
    spec_.dtype = "bf16";
    spec_.steps = 2;
    spec_.stage = GetParam();
  }

  // `hosts`: a letter for each rank.
  std::vector<std::string> Run(absl::string_view function,
                               const std::string& hosts,
                               const std::string& words = "") {
    std::vector<std::string> folders;
    for (char host : hosts) folders.push_back(PathOf(host));
    return RunOnRanks(static_cast<int>(hosts.size()), function,
                      absl::StrCat(spec_.ToText(), "\n",
                                   absl::StrJoin(folders, " "), "\n", words));
  }
  std::string PathOf(char host) const { return folder_ / std::string(1, host); }
  // The ends of names: "rank-00001".
  std::vector<std::string> FilesOf(char host) const {
    const auto folder = Folder::Open(absl::StrCat(PathOf(host), "/run/ckpt"),
                                     FileSystem::Real());
    if (!folder.ok()) return {};
    std::vector<std::string> ends;
    const std::vector<std::string> names = folder->Names().value();
    for (const std::string& name : names) {
      ends.push_back(name.substr(name.rfind('.') + 1));
    }
    return ends;
  }

  const TempFolder folder_;
  TrainingSpec spec_;
};

}  // namespace tessera
#endif  // TESTS_CHECKPOINT_CHECKPOINT_LOCAL_TEST_UTIL_H_
