#include "data/tar/tar_shards.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "data/tar/test_archive.h"
#include "data/test_files.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string TextOf(absl::Span<const uint8_t> bytes) {
  return {bytes.begin(), bytes.end()};
}

// Returns "key: name=content name=content" of each sample.
std::vector<std::string> List(const TarShards& shards) {
  std::vector<std::string> list;
  for (int64_t i = 0; i < shards.num_samples(); ++i) {
    std::string line = absl::StrCat(shards.key(i), ":");
    for (const TarShards::Field& field : shards.fields(i)) {
      absl::StrAppend(&line, " ", field.name, "=", TextOf(field.bytes));
    }
    list.push_back(line);
  }
  return list;
}

std::vector<std::string> Listed(const std::string& archive) {
  absl::StatusOr<TarShards> shards =
      TarShards::OpenFiles({WriteTestFile("a.tar", archive)});
  TESSERA_EXPECT_OK(shards);
  return List(*shards);
}

TEST(TarShards, GroupsFilesByNames) {
  EXPECT_THAT(
      Listed(TarMemberBytes("d/1.jpg", "A") + TarMemberBytes("d/1.cls", "0") +
             TarMemberBytes("d/2.cls", "1") +
             TarMemberBytes("d/2.SEG.png", "B") + TarMemberBytes("2.cls", "2") +
             TarEnd()),
      ElementsAre("d/1: jpg=A cls=0", "d/2: cls=1 seg.png=B", "2: cls=2"));
}

TEST(TarShards, PassesOverWhatIsNoSample) {
  EXPECT_THAT(
      Listed(TarMemberBytes("__index.x__", "-") +
             TarMemberBytes("README", "-") + TarMemberBytes("d.x/", "", '5') +
             TarMemberBytes("d.x/.hid", "-") + TarMemberBytes("d.x/1.a", "A") +
             TarMemberBytes("d.x/README", "-") +
             TarMemberBytes("d.x/1.b", "B") + TarEnd()),
      ElementsAre("d.x/1: a=A b=B"));
}

TEST(TarShards, SeveralArchivesByPattern) {
  const std::string folder = TestFolder("d");
  for (int i = 8; i <= 11; ++i) {
    // Keys may come again in another archive.
    WriteBytes(absl::StrCat(folder, "/t-", i < 10 ? "0" : "", i, ".tar"),
               TarMemberBytes("x.n", absl::StrCat(i)) +
                   TarMemberBytes(absl::StrCat("k", i, ".n"), "") + TarEnd());
  }
  TESSERA_ASSERT_OK_AND_ASSIGN(const TarShards shards,
                               TarShards::Open(folder + "/t-{08..11}.tar"));
  EXPECT_THAT(List(shards),
              ElementsAre("x: n=8", "k8: n=", "x: n=9", "k9: n=", "x: n=10",
                          "k10: n=", "x: n=11", "k11: n="));
  EXPECT_EQ(shards.Describe(3), folder + "/t-09.tar: byte 1024: sample k9");
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto bytes, shards.field(6, "n"));
  EXPECT_EQ(TextOf(bytes), "11");
  EXPECT_DEATH(shards.key(8), "8 vs 8");
  EXPECT_DEATH(shards.fields(-1), "-1 vs 0");
}

TEST(TarShards, AFieldThatIsNotThereIsTold) {
  const std::string path =
      WriteTestFile("a.tar", TarMemberBytes("k.jpg", "A") +
                                 TarMemberBytes("k.cls", "0") + TarEnd());
  TESSERA_ASSERT_OK_AND_ASSIGN(const TarShards shards,
                               TarShards::OpenFiles({path}));
  EXPECT_THAT(shards.field(0, "png"),
              StatusIs(StatusCode::kNotFound,
                       path + ": byte 0: sample k has no field png, it has "
                              "jpg, cls"));
}

TEST(TarShards, WhatCannotBeIsRefused) {
  const auto open = [](const std::string& archive) {
    return TarShards::OpenFiles({WriteTestFile("a.tar", archive)});
  };
  EXPECT_THAT(
      open(TarMemberBytes("1.a", "") + TarMemberBytes("1.A", "") + TarEnd()),
      StatusIs(StatusCode::kDataLoss,
               HasSubstr("a.tar: byte 512: 1.A: the sample 1 has two "
                         "files .a")));
  EXPECT_THAT(open(TarMemberBytes("1.a", "") + TarMemberBytes("2.a", "") +
                   TarMemberBytes("1.b", "") + TarEnd()),
              StatusIs(StatusCode::kDataLoss,
                       HasSubstr("a.tar: byte 1024: 1.b does not lie beside")));
  EXPECT_THAT(open(TarMemberBytes("README", "") + TarEnd()),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("a.tar: no sample in 1 archives")));
  EXPECT_THAT(TarShards::OpenFiles({}),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("in 0 arch")));
  EXPECT_THAT(open(TarMemberBytes("1.a", "")),
              StatusIs(StatusCode::kDataLoss,
                       HasSubstr("a.tar: byte 512: the archive ends without")));
  EXPECT_THAT(TarShards::Open("/nowhere/{0..1}.tar"),
              StatusIs(StatusCode::kNotFound, HasSubstr("/nowhere/0.tar")));
}

}  // namespace
}  // namespace tessera
