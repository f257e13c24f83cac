#include "engine/program/world_options.h"

#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "engine/program/start.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

std::string File(const std::string& text) {
  const std::string path = testing::TempDir() + "/options.json";
  std::ofstream(path) << text;
  return path;
}

TEST(WorldOptionsFromTest, TakesWhatTheSectionSays) {
  WorldOptions defaults;
  defaults.startup_timeout = absl::Seconds(7);
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const WorldOptions options,
      // Other sections are not looked at yet: the world size is not known.
      WorldOptionsFrom(File(R"({"train_batch_size": 3, "communication": {
          "backend": "gloo", "timeout_seconds": 1.5,
          "nccl": {"NCCL_DEBUG": "INFO"}}})"),
                       defaults));
  EXPECT_EQ(options.backend, "gloo");
  EXPECT_EQ(options.collective_timeout, absl::Milliseconds(1500));
  EXPECT_EQ(options.startup_timeout, absl::Seconds(7));
  EXPECT_THAT(options.nccl_environment,
              ElementsAre(Pair("NCCL_DEBUG", "INFO")));
}

TEST(WorldOptionsFromTest, NoSectionChangesNothing) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const WorldOptions options,
                               WorldOptionsFrom(File("{}")));
  EXPECT_EQ(options.backend, "auto");
  EXPECT_EQ(options.collective_timeout, WorldOptions().collective_timeout);
}

TEST(WorldOptionsFromTest, FaultsOfTheSectionAreErrors) {
  EXPECT_THAT(
      WorldOptionsFrom(File("{\"communication\": {\"backend\": \"mpi\"}}")),
      StatusIs(
          StatusCode::kInvalidArgument,
          HasSubstr("options.json:1:31: communication.backend: expected auto, "
                    "shm, hierarchical, gloo, nccl or cuda_ipc, got 'mpi'")));
  EXPECT_THAT(WorldOptionsFrom("/nowhere.json"),
              StatusIs(StatusCode::kNotFound));
}

TEST(CheckCommunicationTest, NamesWhatDiffers) {
  WorldOptions options;
  proto::Communication communication;
  TESSERA_EXPECT_OK(CheckCommunication(communication, options));
  communication.set_backend("auto");
  communication.set_timeout_seconds(300);
  communication.set_startup_timeout_seconds(1);
  TESSERA_EXPECT_OK(CheckCommunication(communication, options));
  const auto expect = [&](const std::string& words) {
    EXPECT_THAT(CheckCommunication(communication, options),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr(words)));
  };
  (*communication.mutable_nccl())["NCCL_DEBUG"] = "INFO";
  expect(
      "communication.nccl.NCCL_DEBUG: the configuration says 'INFO', the "
      "world was made with ''; pass WorldOptionsFrom(path) to Init");
  options.nccl_environment["NCCL_DEBUG"] = "WARN";
  expect("made with 'WARN'");
  options.nccl_environment["NCCL_DEBUG"] = "INFO";
  TESSERA_EXPECT_OK(CheckCommunication(communication, options));
  communication.set_timeout_seconds(5);
  expect("communication.timeout_seconds: the configuration says '5s'");
  communication.set_backend("gloo");
  expect(
      "communication.backend: the configuration says 'gloo', the world was "
      "made with 'auto'");
}

}  // namespace
}  // namespace tessera
