// Checkpoints of other numbers of files, and rules of names.
#include "checkpoint/exchange/rewrite.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/exchange/name_map.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/manifest.h"
#include "checkpoint/format/sample_checkpoint_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(ReshardTest, AnyNumberOfFilesHoldsTheSame) {
  const SampleCheckpoint sample(1, /*large=*/true);
  for (const int from : {1, 3}) {
    for (const int to : {1, 2, 5}) {
      MemoryDisk disk;
      bool committed = false;
      TESSERA_ASSERT_OK(sample.Save("/run/a", &disk, from, &committed));
      TESSERA_ASSERT_OK(
          SampleCheckpoint(9).Save("/run/b", &disk, 2, &committed));
      TESSERA_ASSERT_OK(
          ReshardCheckpoint("/run/a", "/run/b", to, nullptr, &disk));
      TESSERA_EXPECT_OK(sample.Compare("/run/b", &disk, 2));
      CheckpointReader reader = CheckpointReader::Open("/run/b", &disk).value();
      EXPECT_EQ(reader.manifest().files_size(), to);
      TESSERA_EXPECT_OK(reader.Verify(1));
      for (int r = 0; r < to; ++r) {
        const auto values = reader.ValuesOf(r).value();
        ASSERT_EQ(values.size(), r < from ? 1 : 0);
        if (r < from) EXPECT_EQ(values[0].value(), absl::StrCat(r));
      }
      EXPECT_EQ(disk.FilesIn("/run/b").size(), static_cast<size_t>(to) + 2);
    }
  }
}

TEST(ReshardTest, ADamagedOneLeavesWhatWasThere) {
  MemoryDisk disk;
  const SampleCheckpoint sample(1), old(2);
  bool committed = false;
  TESSERA_ASSERT_OK(sample.Save("/run/a", &disk, 2, &committed));
  TESSERA_ASSERT_OK(old.Save("/run/b", &disk, 2, &committed));
  EXPECT_EQ(ReshardCheckpoint("/run/a", "/run/a", 2, nullptr, &disk).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReshardCheckpoint("/run/a", "/run/b", 0, nullptr, &disk).code(),
            absl::StatusCode::kInvalidArgument);
  const Folder folder = Folder::Open("/run/a", &disk).value();
  const uint64_t id = CheckpointReader::Open("/run/a", &disk)->manifest().id();
  TESSERA_ASSERT_OK(
      folder.OpenOrCreateFile(DataFileName(id, 1))->WriteAt(1, "damage"));
  EXPECT_EQ(ReshardCheckpoint("/run/a", "/run/b", 3, nullptr, &disk).code(),
            absl::StatusCode::kDataLoss);
  TESSERA_EXPECT_OK(old.Compare("/run/b", &disk, 1));
  EXPECT_EQ(disk.FilesIn("/run/b").size(), 4);
}

TEST(NameMapTest, ABadRuleIsNamedByItsLine) {
  for (const char* rule : {"a", "a b c", "a b transposed d", "a - transposed",
                           "*.* b", "a *", "a.* b.*.*"}) {
    EXPECT_THAT(
        NameMap::Parse(absl::StrCat("x y\n", rule), "FILE").status().message(),
        HasSubstr("FILE:2: expected"))
        << rule;
  }
  EXPECT_EQ(NameMap::Load("no such file").status().code(),
            absl::StatusCode::kNotFound);
  const NameMap gpt2 = NameMap::Load("gpt2").value();
  EXPECT_EQ(gpt2.Theirs("blocks.7.up.weight").name,
            "transformer.h.7.mlp.c_fc.weight");
  EXPECT_TRUE(gpt2.Theirs("blocks.7.up.weight").transposed);
  EXPECT_EQ(gpt2.Theirs("blocks.7.x.up.weight").name, "blocks.7.x.up.weight");
}

}  // namespace
}  // namespace tessera
