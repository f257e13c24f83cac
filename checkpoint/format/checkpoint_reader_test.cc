// What is read of a checkpoint: any ranges, each byte once, none that is
// damaged.
#include "checkpoint/format/checkpoint_reader.h"

#include <fcntl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/disk/memory_disk.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/format/sample_checkpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

constexpr char kPath[] = "/run/ckpt";

class CheckpointReaderTest : public testing::Test {
 protected:
  void Save(int num_ranks) {
    bool committed = false;
    TESSERA_ASSERT_OK(sample_.Save(kPath, &disk_, num_ranks, &committed));
  }
  CheckpointReader Open() {
    return CheckpointReader::Open(kPath, &disk_).value();
  }
  // Changes a byte, as nobody may.
  void Flip(const std::string& name, int64_t at) {
    const int fd = disk_.Open(AT_FDCWD, absl::StrCat(kPath, "/", name), O_RDWR);
    char byte = 0;
    ASSERT_EQ(disk_.Read(fd, &byte, 1, at), 1);
    byte = static_cast<char>(byte ^ 4);
    disk_.Write(fd, &byte, 1, at);
    disk_.Close(fd);
  }

  MemoryDisk disk_;
  SampleCheckpoint sample_{7, /*large=*/true};
};

TEST_F(CheckpointReaderTest, AnyNumberOfRanksReadsWhatAnyOtherWrote) {
  for (int writers : {1, 2, 3, 5}) {
    Save(writers);
    for (int readers : {1, 2, 3, 4, 7}) {
      TESSERA_EXPECT_OK(sample_.Compare(kPath, &disk_, readers));
    }
    TESSERA_EXPECT_OK(Open().Verify(2));
  }
}

TEST_F(CheckpointReaderTest, RanksHaveValuesOfTheirOwn) {
  Save(3);
  CheckpointReader reader = Open();
  for (int r = 0; r < 3; ++r) {
    const auto values = reader.ValuesOf(r);
    TESSERA_ASSERT_OK(values.status());
    ASSERT_EQ(values->size(), 1u);
    EXPECT_EQ((*values)[0].value(), absl::StrCat(r));
  }
}

// 300,001 elements of storage 7, by ranges that begin and end within blocks.
TEST_F(CheckpointReaderTest, ReadsLittleMoreThanIsWanted) {
  Save(2);
  CheckpointReader reader = Open();
  std::string to(2 * 100000, '\0');  // bfloat16
  TESSERA_ASSERT_OK(reader.Read({{7, 0, 90001, 190001, to.data()}}, 2));
  EXPECT_TRUE(to == sample_.bytes(7, 0).substr(2 * 90001, to.size()));
  const int64_t edges =
      4 * kBlockBytes;  // one at each end in each of two files
  EXPECT_LE(reader.bytes_read(), static_cast<int64_t>(to.size()) + edges);
}

TEST_F(CheckpointReaderTest, EveryFlippedByteIsNamed) {
  sample_ = SampleCheckpoint(3);
  Save(2);
  const auto files = disk_.FilesIn(kPath);
  int64_t in_pads = 0;
  for (const auto& [name, bytes] : files) {
    for (size_t at = 0; at < bytes.size(); ++at) {
      Flip(name, static_cast<int64_t>(at));
      absl::StatusOr<CheckpointReader> reader =
          CheckpointReader::Open(kPath, &disk_);
      absl::Status status = reader.status();
      if (status.ok()) status = reader->Verify(1);
      if (status.ok()) {
        ++in_pads;  // between pieces: nobody reads it
      } else {
        EXPECT_THAT(std::string(status.message()),
                    AllOf(HasSubstr(absl::StrCat(kPath, "/", name)),
                          AnyOf(HasSubstr("not what was written"),
                                HasSubstr("is no manifest"),
                                HasSubstr("another length"))));
      }
      Flip(name, static_cast<int64_t>(at));
    }
  }
  // Pieces begin at multiples of 64.
  EXPECT_LT(in_pads, 64 * 12);
  TESSERA_EXPECT_OK(Open().Verify(1));
}

TEST_F(CheckpointReaderTest, NamesATensorThatIsDamaged) {
  Save(1);
  const auto files = disk_.FilesIn(kPath);
  const std::string name = files.begin()->first;
  const std::string wanted = sample_.bytes(3, 0).substr(0, 100);
  Flip(name, static_cast<int64_t>(files.at(name).find(wanted)) + 70000);
  EXPECT_THAT(Open().Verify(2),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr(name), HasSubstr("'value' of "
                                                        "'layer3.weight'"))));
  // Who does not want it does not see it.
  std::string to(4, '\0');
  TESSERA_EXPECT_OK(Open().Read({{{0, 0, 0, 1, to.data()}}}, 1));
}

TEST_F(CheckpointReaderTest, AFileOfAnotherSizeOrNoFile) {
  Save(2);
  const std::string name = DataFileName(Open().manifest().id(), 1);
  const int fd = disk_.Open(AT_FDCWD, absl::StrCat(kPath, "/", name), O_RDWR);
  const int64_t end =
      static_cast<int64_t>(disk_.FilesIn(kPath).at(name).size());
  disk_.Write(fd, "x", 1, end);
  disk_.Close(fd);
  EXPECT_THAT(Open().Verify(1),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr(absl::StrCat("has ", end + 1,
                                              " bytes, expected ", end))));
  EXPECT_THAT(Open().IndexBytes(1), StatusIs(absl::StatusCode::kDataLoss));
  disk_.Remove(AT_FDCWD, absl::StrCat(kPath, "/", name));
  EXPECT_THAT(Open().Verify(1),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr(name)));
}

TEST_F(CheckpointReaderTest, WhatIsReplacedMeanwhileIsAnError) {
  Save(2);
  CheckpointReader old = Open();
  bool committed = false;
  TESSERA_ASSERT_OK(
      SampleCheckpoint(8, true).Save(kPath, &disk_, 2, &committed));
  EXPECT_THAT(old.Verify(1), StatusIs(absl::StatusCode::kAborted,
                                      HasSubstr("took the place")));
}

// What was verified can be read to its place even so.
TEST_F(CheckpointReaderTest, FilesStayOpenFromTheFirstRead) {
  Save(3);
  const std::string& expected = sample_.bytes(7, 0);
  const int64_t numel = static_cast<int64_t>(expected.size()) / 2;
  CheckpointReader reader = Open();
  EXPECT_TRUE(reader.keeps_files_open());
  TESSERA_ASSERT_OK(reader.Read({{7, 0, 0, numel, nullptr}}, 2));
  bool committed = false;
  TESSERA_ASSERT_OK(
      SampleCheckpoint(8, true).Save(kPath, &disk_, 2, &committed));
  std::string to(expected.size(), '\0');
  TESSERA_ASSERT_OK(reader.Read({{7, 0, 0, numel, to.data()}}, 2));
  EXPECT_EQ(to, expected);
}

TEST_F(CheckpointReaderTest, WhatIsReadAgainIsVerifiedAgain) {
  Save(1);
  std::string to = sample_.bytes(7, 0);
  const int64_t numel = static_cast<int64_t>(to.size()) / 2;
  CheckpointReader reader = Open();
  TESSERA_ASSERT_OK(reader.Read({{7, 0, 0, numel, nullptr}}, 1));
  const int64_t read = reader.bytes_read();
  Flip(DataFileName(reader.manifest().id(), 0),
       reader.manifest().files(0).index_offset() - 100);
  EXPECT_EQ(Open().Verify(1).code(), absl::StatusCode::kDataLoss);
  const absl::Status again = reader.Read({{7, 0, 0, numel, to.data()}}, 1);
  EXPECT_EQ(again.code(), absl::StatusCode::kDataLoss);
  EXPECT_GT(reader.bytes_read(), read);
}

TEST_F(CheckpointReaderTest, ManyFilesAreNotKeptOpen) {
  Save(130);
  CheckpointReader reader = Open();
  EXPECT_FALSE(reader.keeps_files_open());
  TESSERA_EXPECT_OK(reader.Verify(3));
  TESSERA_EXPECT_OK(sample_.Compare(kPath, &disk_, 2));
}

// Of 100 numbers two ranks write these.
TEST_F(CheckpointReaderTest, NumbersThatNoFileHasOrTwo) {
  const auto save = [&](std::pair<int64_t, int64_t> first,
                        std::pair<int64_t, int64_t> second) {
    absl::StatusOr<Saving> saving = Saving::Begin(kPath, &disk_);
    TESSERA_ASSERT_OK(saving.status());
    proto::CheckpointManifest manifest;
    manifest.set_format_version(kCheckpointFormat);
    manifest.set_id(saving->id());
    proto::CheckpointStorage* const storage = manifest.add_storages();
    storage->set_numel(100);
    storage->add_tensors()->set_name("weight");
    storage->add_states()->set_name("value");
    storage->mutable_states(0)->set_dtype("U8");
    int rank = 0;
    for (const auto& [begin, end] : {first, second}) {
      auto writer =
          DataFileWriter::Create(saving->folder(), saving->id(), rank++);
      TESSERA_ASSERT_OK(writer.status());
      TESSERA_ASSERT_OK(
          writer->Add(0, 0, begin, end - begin,
                      std::string(static_cast<size_t>(end - begin), 'x')));
      *manifest.add_files() = writer->Finish().value();
    }
    bool committed = false;
    TESSERA_ASSERT_OK(saving->Commit(manifest, &committed));
  };
  save({0, 50}, {50, 100});
  TESSERA_EXPECT_OK(Open().Verify(1));
  save({0, 50}, {60, 100});
  EXPECT_THAT(Open().Verify(1),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("'value' of 'weight': no data file has "
                                 "element 50")));
  save({0, 50}, {50, 90});
  EXPECT_THAT(Open().Verify(1), StatusIs(absl::StatusCode::kDataLoss,
                                         HasSubstr("has element 90")));
  save({0, 50}, {40, 100});
  EXPECT_THAT(Open().Verify(1),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("more than one data file has element 40")));
}

TEST_F(CheckpointReaderTest, NothingThere) {
  EXPECT_THAT(CheckpointReader::Open(kPath, &disk_).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(kPath)));
  disk_.MakeFolder(AT_FDCWD, "/run");
  EXPECT_THAT(CheckpointReader::Open("/run", &disk_).status(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("manifest")));
}

}  // namespace
}  // namespace tessera
