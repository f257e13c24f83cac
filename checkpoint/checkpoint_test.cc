#include "checkpoint/checkpoint.h"

#include <stdlib.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/bits.h"
#include "base/file.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/group/self_communicator.h"
#include "google/protobuf/text_format.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor BytesOf(const std::string& text) {
  at::Tensor bytes =
      torch::empty({static_cast<int64_t>(text.size())}, torch::kByte);
  std::copy(text.begin(), text.end(), bytes.mutable_data_ptr<uint8_t>());
  return bytes;
}

std::string TextOf(const at::Tensor& bytes) {
  return std::string(static_cast<const char*>(bytes.const_data_ptr()),
                     static_cast<size_t>(bytes.numel()));
}

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() {
    std::string pattern = ::testing::TempDir() + "/checkpoint_XXXXXX";
    TORCH_CHECK(mkdtemp(pattern.data()) != nullptr);
    folder_ = pattern;
    dir_ = folder_ + "/ckpt";
    manifest_path_ = dir_ + "/manifest.textproto";
    head_.set_world_size(1);
    head_.set_stage(3);
    head_.set_step(1);
    head_.set_model("a model");
    // Of sizes around a page, one of none.
    contents_ = {{"small", "abc"},
                 {"empty", ""},
                 {"page", std::string(4096, 'p')},
                 {"more", std::string(4097, 'm')},
                 {"zeros", std::string(10000, '\0')}};
  }
  ~CheckpointTest() override { fs::remove_all(folder_); }

  absl::Status Write(const std::string& dir) {
    std::vector<CheckpointPart> parts;
    for (const auto& [name, text] : contents_) {
      parts.push_back({name, BytesOf(text)});
    }
    return WriteCheckpoint(dir, head_, parts, comm_.get());
  }
  // What a load does: manifest, verification, every part.
  absl::Status Load() {
    TESSERA_ASSIGN_OR_RETURN(auto manifest, ReadManifest(dir_, head_));
    const proto::CheckpointFile& file = manifest.files(0);
    TESSERA_RETURN_IF_ERROR(VerifyRankFile(dir_, file));
    for (const auto& [name, text] : contents_) {
      CheckpointPart part{name, BytesOf(std::string(text.size(), '?'))};
      TESSERA_RETURN_IF_ERROR(ReadPart(dir_, file, &part));
      EXPECT_EQ(TextOf(part.bytes), text) << name;
    }
    loaded_step_ = manifest.step();
    return absl::OkStatus();
  }
  std::string ReadText() { return ReadWholeFile(manifest_path_).value(); }
  void WriteText(const std::string& text) {
    std::ofstream(manifest_path_) << text;
  }
  // Writes `manifest` with a fingerprint that fits, as no accident would.
  void WriteSigned(proto::CheckpointManifest manifest) {
    manifest.clear_fingerprint();
    const std::string bytes = manifest.SerializeAsString();
    manifest.set_fingerprint(
        Fingerprint(bytes.data(), static_cast<int64_t>(bytes.size())));
    std::string text;
    google::protobuf::TextFormat::PrintToString(manifest, &text);
    WriteText(text);
  }

  std::shared_ptr<Communicator> comm_ = MakeSelfCommunicator();
  std::string folder_, dir_, manifest_path_;
  proto::CheckpointManifest head_;
  std::vector<std::pair<std::string, std::string>> contents_;
  int64_t loaded_step_ = -1;
};

TEST_F(CheckpointTest, ReadsWhatItWrote) {
  TESSERA_ASSERT_OK(Write(dir_));
  TESSERA_ASSERT_OK(Load());
  EXPECT_EQ(loaded_step_, 1);
  EXPECT_FALSE(fs::exists(dir_ + ".tmp"));
}

TEST_F(CheckpointTest, TakesAFolderNameWithSlashesAtItsEnd) {
  TESSERA_ASSERT_OK(Write(dir_ + "//"));
  TESSERA_ASSERT_OK(Load());
}

TEST_F(CheckpointTest, MakesTheFoldersAbove) {
  dir_ = folder_ + "/a/b/ckpt";
  TESSERA_ASSERT_OK(Write(dir_));
  TESSERA_ASSERT_OK(Load());
}

TEST_F(CheckpointTest, StartsEveryChunkAtAPage) {
  TESSERA_ASSERT_OK(Write(dir_));
  TESSERA_ASSERT_OK_AND_ASSIGN(auto manifest, ReadManifest(dir_, head_));
  ASSERT_EQ(manifest.files_size(), 1);
  int64_t end = 0;
  for (const auto& chunk : manifest.files(0).chunks()) {
    EXPECT_EQ(chunk.offset_bytes() % 4096, 0);
    EXPECT_GE(chunk.offset_bytes(), end);
    end = chunk.offset_bytes() + chunk.bytes();
  }
  EXPECT_EQ(fs::file_size(dir_ + "/" + manifest.files(0).name()),
            static_cast<uintmax_t>(manifest.files(0).bytes()));
}

TEST_F(CheckpointTest, ReplacesAnOlderCheckpointWhole) {
  TESSERA_ASSERT_OK(Write(dir_));
  std::ofstream(dir_ + "/rank-00007.bin") << "of the old one";
  contents_ = {{"other", "of the new one"}};
  head_.set_step(2);
  TESSERA_ASSERT_OK(Write(dir_));
  TESSERA_ASSERT_OK(Load());
  EXPECT_EQ(loaded_step_, 2);
  EXPECT_FALSE(fs::exists(dir_ + "/rank-00007.bin"));
  EXPECT_FALSE(fs::exists(dir_ + ".tmp"));
}

TEST_F(CheckpointTest, IsNotStoppedByALeftover) {
  fs::create_directories(dir_ + ".tmp/rank-00000.bin");
  TESSERA_ASSERT_OK(Write(dir_));
  TESSERA_ASSERT_OK(Load());
}

TEST_F(CheckpointTest, NeverDeletesWhatIsNoCheckpoint) {
  for (const char* suffix : {"", ".tmp"}) {
    const std::string folder = dir_ + suffix;
    const std::string thesis = folder + "/thesis.txt";
    fs::create_directories(folder);
    std::ofstream(thesis) << "years of work";
    EXPECT_THAT(Write(dir_),
                StatusIs(absl::StatusCode::kAlreadyExists,
                         AllOf(HasSubstr(folder), HasSubstr("'thesis.txt'"))));
    EXPECT_EQ(ReadWholeFile(thesis).value(), "years of work");
    fs::remove_all(folder);
    std::ofstream(folder) << "a file";
    EXPECT_THAT(Write(dir_),
                StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(folder)));
    EXPECT_EQ(ReadWholeFile(folder).value(), "a file");
    fs::remove(folder);
  }
}

TEST_F(CheckpointTest, NamesAFolderThatCannotBeLookedAt) {
  fs::create_symlink("loop", folder_ + "/loop");
  EXPECT_THAT(
      Write(folder_ + "/loop"),
      StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(folder_ + "/loop")));
  EXPECT_THAT(Write(folder_ + "/loop/ckpt").ToString(),
              HasSubstr(folder_ + "/loop/ckpt"));
}

TEST_F(CheckpointTest, NamesAnEmptyManifest) {
  TESSERA_ASSERT_OK(Write(dir_));
  WriteText("");
  EXPECT_THAT(Load(),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr(manifest_path_), HasSubstr("damaged"))));
}

TEST_F(CheckpointTest, NamesAFolderThatCannotBeWritten) {
  std::ofstream(folder_ + "/file") << "not a folder";
  EXPECT_THAT(Write(folder_ + "/file/ckpt").ToString(),
              HasSubstr(folder_ + "/file/ckpt"));
  EXPECT_THAT(
      Write(folder_ + "/file"),
      StatusIs(absl::StatusCode::kAlreadyExists, HasSubstr(folder_ + "/file")));
  EXPECT_THAT(Write(""), StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST_F(CheckpointTest, NamesWhatItDiffersIn) {
  TESSERA_ASSERT_OK(Write(dir_));
  auto refused = [&](proto::CheckpointManifest expected, const char* words) {
    EXPECT_THAT(ReadManifest(dir_, expected),
                StatusIs(absl::StatusCode::kFailedPrecondition,
                         AllOf(HasSubstr(dir_), HasSubstr(words))));
  };
  proto::CheckpointManifest expected = head_;
  expected.set_world_size(4);
  refused(expected, "world size 1, this run has 4");
  expected = head_;
  expected.set_stage(0);
  refused(expected, "stage 3, this run has 0");
  expected = head_;
  expected.set_model("another");
  refused(expected, "the model a model, this run has another");
  WriteText(absl::StrReplaceAll(ReadText(),
                                {{"format_version: 0", "format_version: 7"}}));
  refused(head_, "format version 7, this run has 0");
}

TEST_F(CheckpointTest, FindsEveryFlippedByteOfAChunk) {
  contents_ = {{"first", "some bytes"}, {"second", "and some more"}};
  TESSERA_ASSERT_OK(Write(dir_));
  TESSERA_ASSERT_OK_AND_ASSIGN(auto manifest, ReadManifest(dir_, head_));
  const std::string path = dir_ + "/" + manifest.files(0).name();
  const std::string whole = ReadWholeFile(path).value();
  for (const auto& chunk : manifest.files(0).chunks()) {
    for (int64_t i = 0; i < chunk.bytes(); ++i) {
      std::string bad = whole;
      bad[static_cast<size_t>(chunk.offset_bytes() + i)] ^= 0x10;
      std::ofstream(path, std::ios::binary) << bad;
      EXPECT_THAT(Load(),
                  StatusIs(absl::StatusCode::kDataLoss,
                           AllOf(HasSubstr(path), HasSubstr(chunk.name()))));
    }
  }
}

TEST_F(CheckpointTest, FindsEveryLengthThatIsTooShort) {
  contents_ = {{"first", "some bytes"}, {"second", "and some more"}};
  TESSERA_ASSERT_OK(Write(dir_));
  const std::string path = dir_ + "/rank-00000.bin";
  const int64_t needed = 4096 + 13;
  for (int64_t bytes :
       {int64_t{0}, int64_t{1}, int64_t{9}, int64_t{4096}, needed - 1}) {
    fs::resize_file(path, static_cast<uintmax_t>(bytes));
    EXPECT_THAT(Load(), StatusIs(absl::StatusCode::kDataLoss, HasSubstr(path)));
    TESSERA_ASSERT_OK(Write(dir_));
  }
}

TEST_F(CheckpointTest, NamesWhatIsMissing) {
  EXPECT_THAT(Load(), StatusIs(absl::StatusCode::kNotFound, HasSubstr(dir_)));
  TESSERA_ASSERT_OK(Write(dir_));
  TESSERA_ASSERT_OK_AND_ASSIGN(auto manifest, ReadManifest(dir_, head_));
  CheckpointPart part{"no such", BytesOf("")};
  EXPECT_THAT(ReadPart(dir_, manifest.files(0), &part),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr("'no such'")));
  part = {"small", BytesOf("four")};
  EXPECT_THAT(ReadPart(dir_, manifest.files(0), &part),
              StatusIs(absl::StatusCode::kDataLoss,
                       AllOf(HasSubstr("'small'"), HasSubstr("3 bytes"),
                             HasSubstr("expected 4"))));
  fs::remove(dir_ + "/rank-00000.bin");
  EXPECT_THAT(Load(), StatusIs(absl::StatusCode::kNotFound,
                               HasSubstr("rank-00000.bin")));
  fs::remove(manifest_path_);
  EXPECT_THAT(Load(),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr(manifest_path_)));
}

TEST_F(CheckpointTest, RefusesAManifestThatNamesTooFewFiles) {
  TESSERA_ASSERT_OK(Write(dir_));
  TESSERA_ASSERT_OK_AND_ASSIGN(auto manifest, ReadManifest(dir_, head_));
  manifest.clear_files();
  WriteSigned(manifest);
  EXPECT_THAT(Load(), StatusIs(absl::StatusCode::kDataLoss,
                               AllOf(HasSubstr(dir_),
                                     HasSubstr("0 rank files, expected 1"))));
}

// No flipped bit of the manifest crashes the load or is taken for the truth.
TEST_F(CheckpointTest, NeverLoadsAManifestWithAFlippedBit) {
  contents_ = {{"first", "some bytes"}, {"second", "and some more"}};
  TESSERA_ASSERT_OK(Write(dir_));
  const std::string whole = ReadText();
  for (size_t i = 0; i < whole.size(); ++i) {
    for (int bit : {0, 1, 4, 6}) {
      std::string bad = whole;
      bad[i] = static_cast<char>(bad[i] ^ (1 << bit));
      WriteText(bad);
      loaded_step_ = -1;
      if (Load().ok()) {
        EXPECT_EQ(loaded_step_, 1) << "byte " << i << ": " << bad;
      }
    }
  }
}

TEST_F(CheckpointTest, RefusesSizesThatCannotBe) {
  TESSERA_ASSERT_OK(Write(dir_));
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto whole, ReadManifest(dir_, head_));
  WriteSigned(whole);
  TESSERA_ASSERT_OK(Load());
  for (int64_t bytes : {int64_t{-1}, int64_t{9000000000000000000}}) {
    proto::CheckpointManifest bad = whole;
    auto* more = bad.mutable_files(0)->mutable_chunks(3);
    ASSERT_EQ(more->name(), "more");
    more->set_bytes(bytes);
    WriteSigned(bad);
    EXPECT_THAT(Load(),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("'more'")));
    *more = whole.files(0).chunks(3);
    more->set_offset_bytes(bytes);
    WriteSigned(bad);
    EXPECT_THAT(Load(),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr("'more'")));
  }
}

}  // namespace
}  // namespace tessera
