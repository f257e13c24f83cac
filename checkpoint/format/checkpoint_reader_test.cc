// Tests what is read of a checkpoint: any ranges, each byte once, and no
// damaged byte.
#include "checkpoint/format/checkpoint_reader.h"

#include <errno.h>
#include <fcntl.h>

#include <cstdio>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/format/sample_checkpoint_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

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

  // Makes a file one of other bytes.
  void Put(const std::string& name, const std::string& bytes) {
    const std::string path = absl::StrCat(kPath, "/", name);
    disk_.Remove(AT_FDCWD, path);
    const int fd = disk_.Open(AT_FDCWD, path, O_CREAT | O_RDWR);
    disk_.Write(fd, bytes.data(), static_cast<int64_t>(bytes.size()), 0);
    disk_.Close(fd);
  }
  // Returns what is reported when a checkpoint is opened and verified.
  std::string Verify() {
    absl::StatusOr<CheckpointReader> reader =
        CheckpointReader::Open(kPath, &disk_);
    const absl::Status status =
        reader.ok() ? reader->Verify(1) : reader.status();
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  }
  // `told` has "bytes A to B" with `at` in between.
  static void ExpectRangeAround(int64_t at, const std::string& told) {
    const size_t from = told.find("bytes ");
    ASSERT_NE(from, std::string::npos) << told;
    long long begin = 0, end = 0;
    ASSERT_EQ(sscanf(told.c_str() + from, "bytes %lld to %lld", &begin, &end),
              2)
        << told;
    EXPECT_TRUE(begin <= at && at < end) << at << ": " << told;
  }
  // Returns what a message names if byte `at` of a data file is damaged.
  std::string WhatLiesAt(const proto::CheckpointManifest& manifest,
                         const std::string& name, size_t at) {
    const int rank = name.back() - '0';
    const Folder folder = Folder::Open(kPath, &disk_).value();
    const auto index =
        DataFileReader::Open(folder, manifest, rank)->ReadIndex(manifest);
    if (!index.ok()) return "index";
    for (const proto::CheckpointPiece& piece : index->pieces()) {
      const proto::CheckpointStorage& storage =
          manifest.storages(piece.storage());
      const proto::CheckpointState& state = storage.states(piece.state());
      const int64_t bytes =
          (piece.end() - piece.begin()) * DtypeBytes(state.dtype());
      const int64_t begin = piece.offset();
      if (static_cast<int64_t>(at) >= begin &&
          static_cast<int64_t>(at) < begin + bytes) {
        return absl::StrCat("'", state.name(), "' of '",
                            storage.tensors(0).name(), "'");
      }
    }
    return "between tensors";
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
  const proto::CheckpointManifest manifest = Open().manifest();
  for (const auto& [name, bytes] : disk_.FilesIn(kPath)) {
    for (size_t at = 0; at < bytes.size(); ++at) {
      Flip(name, static_cast<int64_t>(at));
      const std::string told = Verify();
      ASSERT_THAT(told, HasSubstr(absl::StrCat(kPath, "/", name)));
      if (name == kManifestName) {
        EXPECT_THAT(told, AnyOf(HasSubstr("not what was written"),
                                HasSubstr("is no manifest"),
                                HasSubstr("another length")));
      } else {
        EXPECT_THAT(told, HasSubstr("not what was written"));
        ExpectRangeAround(static_cast<int64_t>(at), told);
        EXPECT_THAT(told, HasSubstr(WhatLiesAt(manifest, name, at)));
      }
      Flip(name, static_cast<int64_t>(at));
    }
  }
  TESSERA_EXPECT_OK(Open().Verify(1));
}

// Each file is cut off to every possible length.
TEST_F(CheckpointReaderTest, EveryTruncatedFileIsNamed) {
  sample_ = SampleCheckpoint(3);
  Save(2);
  const std::map<std::string, std::string> files = disk_.FilesIn(kPath);
  for (const auto& [name, bytes] : files) {
    for (size_t left = 0; left < bytes.size(); ++left) {
      Put(name, bytes.substr(0, left));
      const std::string told = Verify();
      ASSERT_THAT(told, HasSubstr(absl::StrCat(kPath, "/", name)));
      if (name == kManifestName) continue;
      EXPECT_THAT(told,
                  AllOf(HasSubstr(absl::StrCat("has ", left, " bytes")),
                        HasSubstr(absl::StrCat("bytes ", left, " to ",
                                               bytes.size(), " are missing")),
                        HasSubstr(".weight'")));
    }
    Put(name, bytes);
  }
  TESSERA_EXPECT_OK(Open().Verify(1));
}

TEST_F(CheckpointReaderTest, FilesOfOtherRanksOrOfOtherCheckpoints) {
  sample_ = SampleCheckpoint(3);
  Save(2);
  const proto::CheckpointManifest manifest = Open().manifest();
  const std::string names[] = {DataFileName(manifest.id(), 0),
                               DataFileName(manifest.id(), 1)};
  const std::map<std::string, std::string> files = disk_.FilesIn(kPath);
  // A file has as many bytes as the rank's own, or the error has their number.
  const auto expect = [&](int rank, const std::string& bytes) {
    Put(names[rank], bytes);
    EXPECT_THAT(Verify(),
                AllOf(HasSubstr(names[rank]),
                      AnyOf(HasSubstr("its index, bytes "),
                            HasSubstr(absl::StrCat("has ", bytes.size(),
                                                   " bytes, expected ")))));
    Put(names[rank], files.at(names[rank]));
  };
  expect(0, files.at(names[1]));
  expect(1, files.at(names[0]));
  // A save of the same tensors, a step later.
  bool committed = false;
  constexpr char kOther[] = "/run/other";
  TESSERA_ASSERT_OK(SampleCheckpoint(4).Save(kOther, &disk_, 2, &committed));
  const std::map<std::string, std::string> others = disk_.FilesIn(kOther);
  for (const auto& [name, bytes] : others) {
    if (name == kManifestName || name == kLockName) continue;
    const int rank = name.back() - '0';
    ASSERT_EQ(bytes.size(), files.at(names[rank]).size());
    expect(rank, bytes);
  }
  Put(kManifestName, others.at(kManifestName));
  EXPECT_THAT(Verify(), AllOf(HasSubstr("No such file"),
                              HasSubstr("a part of the checkpoint")));
  Put(kManifestName, files.at(kManifestName));
  TESSERA_EXPECT_OK(Open().Verify(1));
}

TEST_F(CheckpointReaderTest, ABlockThatTheDiskCannotRead) {
  Save(1);
  CheckpointReader reader = Open();
  // The index is read before.
  TESSERA_ASSERT_OK(reader.ValuesOf(0).status());
  disk_.before = [](int64_t, const char* call) {
    return std::string(call) == "read" ? int64_t{-EIO} : 0;
  };
  EXPECT_THAT(reader.Verify(1).ToString(),
              AllOf(HasSubstr("'value' of 'layer0.weight', bytes 0 to 4"),
                    HasSubstr(DataFileName(reader.manifest().id(), 0)),
                    HasSubstr("Input/output error")));
}

TEST_F(CheckpointReaderTest, AnIndexThatIsSentIsNoLongerThanItsFile) {
  Save(2);
  const CheckpointReader reader = Open();
  const std::string name = DataFileName(reader.manifest().id(), 1);
  Put(name, "x");
  EXPECT_THAT(reader.IndexBytes(1).status(),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr(name), HasSubstr("has 1 bytes"))));
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
  // A read that does not want the damaged element does not see it.
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

// Verified pieces can be read to their place nevertheless.
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

// Two ranks write these of 100 numbers.
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
