// Tests the communication section, before the world is known and with the rest.
#include <fstream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "config/config.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::HasSubstr;

std::string File(const std::string& name, const std::string& text) {
  const std::string path = absl::StrCat(testing::TempDir(), "/", name);
  std::ofstream(path) << text;
  return path;
}

absl::StatusOr<proto::Communication> Load(const std::string& section) {
  return LoadCommunication(
      File("c.json", absl::StrCat("{\"communication\": ", section, "}")));
}

TEST(Communication, AllKeys) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Communication section,
      Load(R"({"backend": "nccl", "timeout_seconds": 30.5,
               "startup_timeout_seconds": 5,
               "nccl": {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"}})"));
  EXPECT_EQ(section.backend(), "nccl");
  EXPECT_EQ(section.timeout_seconds(), 30.5);
  EXPECT_EQ(section.startup_timeout_seconds(), 5);
  EXPECT_EQ(section.nccl().size(), 2);
  EXPECT_EQ(section.nccl().at("NCCL_DEBUG"), "INFO");
  EXPECT_EQ(section.nccl().at("NCCL_IB_DISABLE"), "1");
}

TEST(Communication, AbsentKeysStayAbsent) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Communication section, Load("{}"));
  EXPECT_FALSE(section.has_backend());
  EXPECT_EQ(section.backend(), "auto");
  EXPECT_EQ(section.timeout_seconds(), 300);
  EXPECT_EQ(section.startup_timeout_seconds(), 60);
}

TEST(Communication, FaultsAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"backend": "mpi"})",
       ":1:31: communication.backend: expected auto, shm, hierarchical, "
       "gloo, nccl or cuda_ipc, got 'mpi'"},
      {R"({"timeout_seconds": 0})",
       "communication.timeout_seconds: expected a finite number "
       "above 0, got 0"},
      {R"({"startup_timeout_seconds": -1})",
       "communication.startup_timeout_seconds: expected a finite number "
       "above 0, got -1"},
      {R"({"timeout_seconds": "5"})",
       "communication.timeout_seconds: expected a number, got the string"},
      {R"({"nccl": {"DEBUG": "INFO"}})",
       ":1:38: communication.nccl.DEBUG: expected the name of a variable that "
       "begins with NCCL_"},
      {R"({"nccl": {"NCCL_": "x"}})", "communication.nccl.NCCL_: expected"},
      {R"({"nccl": {"NCCL_A=B": "x"}})", "communication.nccl.NCCL_A=B: expec"},
      {R"({"nccl": {"NCCL_NTHREADS": 256}})",
       "communication.nccl.NCCL_NTHREADS: expected a string, got 256"},
      {R"({"nccl": {"NCCL_A": "a\u0000b"}})", "its value has a null byte"},
      {R"({"nccl": ["NCCL_DEBUG"]})",
       "communication.nccl: expected an object, got an array"},
      {R"({"timeout": 3})", "communication.timeout: unknown key"},
      {R"([])", "communication: expected an object, got an array"},
  };
  for (const auto& [section, words] : cases) {
    EXPECT_THAT(Load(section),
                StatusIs(StatusCode::kInvalidArgument, HasSubstr(words)))
        << section;
  }
}

TEST(Communication, OtherSectionsAreNotLookedAt) {
  const std::string path =
      File("others.json", R"({"train_batch_size": -3, "misspelt": 1,
                         "communication": {"backend": "gloo"}})");
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Communication section,
                               LoadCommunication(path));
  EXPECT_EQ(section.backend(), "gloo");
  EXPECT_THAT(LoadCommunication(File("broken.json", "{")),
              StatusIs(StatusCode::kInvalidArgument));
  EXPECT_THAT(LoadCommunication(File("array.json", "[]")),
              StatusIs(StatusCode::kInvalidArgument));
}

TEST(Communication, InText) {
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const proto::Communication section,
      LoadCommunication(File("c.textproto",
                             "communication { backend: \"gloo\" nccl { key: "
                             "\"NCCL_DEBUG\" value: \"INFO\" } }")));
  EXPECT_EQ(section.nccl().at("NCCL_DEBUG"), "INFO");
}

TEST(Communication, IsCheckedWithTheRest) {
  const auto parse = [](const std::string& section) {
    return ParseConfig(
        absl::StrCat("{\"train_batch_size\": 2, \"gradient_clipping\": 0, "
                     "\"communication\": ",
                     section, "}"),
        "f.json", 2);
  };
  TESSERA_ASSERT_OK_AND_ASSIGN(const proto::Config config,
                               parse(R"({"nccl": {"NCCL_DEBUG": "INFO"}})"));
  EXPECT_EQ(config.communication().nccl().at("NCCL_DEBUG"), "INFO");
  EXPECT_THAT(parse(R"({"backend": "tcp"})"),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("communication.backend")));
  // Neither half of a map's entry is a key of the schema.
  EXPECT_THAT(
      ParseConfig("{\"key\": 1, \"gradient_clipping\": 0}", "f.json", 2),
      StatusIs(StatusCode::kInvalidArgument,
               testing::Not(HasSubstr("communication"))));
}

}  // namespace
}  // namespace tessera
