#include "checkpoint/exchange/command.h"

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/command/command_line.h"
#include "base/command/command_terminal.h"
#include "base/status_matchers.h"
#include "checkpoint/exchange/terminal.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/format/sample_checkpoint_test_util.h"
#include "config/reader/json_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;

class CommandTest : public testing::Test {
 protected:
  CommandTest() {
    std::string pattern = testing::TempDir() + "/command_XXXXXX";
    EXPECT_NE(mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    Save(1, "a");
    Save(2, "b");
  }
  ~CommandTest() override { fs::remove_all(folder_); }

  void Save(int seed, const std::string& name) {
    bool committed = false;
    TESSERA_ASSERT_OK(SampleCheckpoint(seed).Save(
        folder_ + "/" + name, FileSystem::Real(), 2, &committed));
  }
  // Changes the manifest as if the checkpoint had been saved so.
  void Change(const std::string& name,
              const std::function<void(proto::CheckpointManifest*)>& change) {
    const std::string dir = folder_ + "/" + name;
    auto manifest = CheckpointReader::Open(dir, FileSystem::Real())->manifest();
    change(&manifest);
    std::ofstream(dir + "/manifest", std::ios::binary)
        << EncodeManifest(manifest).value();
  }
  // A checkpoint of a rank's words alone.
  void SaveWords(const std::string& name, const std::string& words) {
    TESSERA_ASSERT_OK_AND_ASSIGN(
        Saving saving, Saving::Begin(folder_ + "/" + name, FileSystem::Real()));
    TESSERA_ASSERT_OK_AND_ASSIGN(
        DataFileWriter writer,
        DataFileWriter::Create(saving.folder(), saving.id(), 0));
    writer.AddValue("client_state", words);
    proto::CheckpointManifest manifest;
    manifest.set_format_version(kCheckpointFormat);
    manifest.set_id(saving.id());
    TESSERA_ASSERT_OK_AND_ASSIGN(*manifest.add_files(), writer.Finish());
    bool committed = false;
    TESSERA_ASSERT_OK(saving.Commit(manifest, &committed));
  }
  int Run(const std::vector<std::string>& args) {
    std::ostringstream out, err;
    std::vector<std::string> words = {"checkpoint"};
    words.insert(words.end(), args.begin(), args.end());
    const int status = CommandLine("tessera", CheckpointCommands())
                           .Run(words, &out, &err, terminal_);
    out_ = out.str();
    err_ = err.str();
    return status;
  }

  // From now on somebody sits at a terminal and says this.
  void Answer(const std::string& answer) {
    terminal_.shows_err = true;
    terminal_.read_line = [answer](std::string* line) {
      *line = answer;
      return answer != kEndOfInput;
    };
  }

  static constexpr char kEndOfInput[] = "(end)";
  CommandTerminal terminal_;
  std::string folder_, out_, err_;
};

TEST_F(CommandTest, ListsAndShows) {
  EXPECT_EQ(Run({"ls", folder_}), 0);
  EXPECT_THAT(out_, AllOf(HasSubstr("/a: step 1, 196 parameters"),
                          HasSubstr("/b: step 2"), HasSubstr("in 2 files")));
  EXPECT_EQ(Run({"show", folder_ + "/b"}), 0);
  EXPECT_THAT(out_, HasSubstr("layer1.weight [65]: value BF16\n"));
  EXPECT_EQ(Run({"ls", folder_ + "/b"}), 0);
  Change("b", [](proto::CheckpointManifest* manifest) {
    manifest->mutable_training()->set_samples(640);
  });
  EXPECT_EQ(Run({"ls", folder_ + "/b"}), 0);
  EXPECT_THAT(out_, HasSubstr("/b: step 2, 640 samples, 196 parameters"));
  fs::create_directory(folder_ + "/none");
  EXPECT_EQ(Run({"ls", folder_ + "/none"}), 1);
}

TEST_F(CommandTest, ForPrograms) {
  ASSERT_EQ(Run({"ls", folder_, "--json"}), 0) << err_;
  TESSERA_ASSERT_OK_AND_ASSIGN(const JsonValue list, ReadJson(out_, ""));
  ASSERT_EQ(list.elements.size(), 2u);
  EXPECT_EQ(list.elements[1].Find("path")->text, folder_ + "/b");
  EXPECT_EQ(list.elements[1].Find("step")->number, 2);
  EXPECT_EQ(list.elements[0].Find("parameters")->number, 196);
  ASSERT_EQ(Run({"show", folder_ + "/b", "--json"}), 0) << err_;
  TESSERA_ASSERT_OK_AND_ASSIGN(const JsonValue shown, ReadJson(out_, ""));
  bool found = false;
  for (const JsonValue& tensor : shown.Find("tensors")->elements) {
    if (tensor.Find("name")->text != "layer1.weight") continue;
    found = true;
    EXPECT_EQ(tensor.Find("sizes")->elements.at(0).number, 65);
    EXPECT_EQ(tensor.Find("states")->Find("value")->text, "BF16");
  }
  EXPECT_TRUE(found) << out_;
  ASSERT_EQ(Run({"verify", folder_ + "/b", "--json"}), 0) << err_;
  TESSERA_ASSERT_OK_AND_ASSIGN(const JsonValue whole, ReadJson(out_, ""));
  EXPECT_TRUE(whole.Find("whole")->boolean);
  EXPECT_EQ(Run({"diff", folder_ + "/a", folder_ + "/b", "--json"}), 1);
  TESSERA_ASSERT_OK_AND_ASSIGN(const JsonValue diff, ReadJson(out_, ""));
  EXPECT_GE(diff.Find("differences")->number, 7);
  std::ofstream(folder_ + "/a/manifest") << "zeros";
  EXPECT_EQ(Run({"ls", folder_, "--json"}), 1);
  TESSERA_ASSERT_OK_AND_ASSIGN(const JsonValue damaged, ReadJson(out_, ""));
  EXPECT_THAT(damaged.elements.at(0).Find("error")->text,
              HasSubstr("is no manifest"));
}

// An unreadable checkpoint is listed once, and the exit code says so, too.
TEST_F(CommandTest, ListsWhatCannotBeReadAndSaysSo) {
  std::ofstream(folder_ + "/a/manifest") << "zeros after a power cut";
  EXPECT_EQ(Run({"ls", folder_}), 1);
  EXPECT_THAT(out_, AllOf(StartsWith(folder_ + "/a/manifest: is no manifest"),
                          HasSubstr("/b: step 2")));
  EXPECT_THAT(err_, HasSubstr(folder_ + ": 1 of 2 checkpoints cannot be read"));
  // It can go.
  EXPECT_EQ(Run({"rm", folder_ + "/a", "--yes"}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("/a: a checkpoint that cannot be read, 2 files"));
  EXPECT_FALSE(fs::exists(folder_ + "/a"));
  EXPECT_EQ(Run({"ls", folder_}), 0);
}

TEST_F(CommandTest, Verifies) {
  EXPECT_EQ(Run({"verify", folder_ + "/a"}), 0);
  EXPECT_THAT(out_, StartsWith(folder_ + "/a: whole; step 1"));
  // The checkpoint links to files that lie elsewhere.
  fs::create_directory(folder_ + "/store");
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder_ + "/a")) {
    files.push_back(entry.path());
  }
  for (const fs::path& file : files) {
    const fs::path there = fs::path(folder_) / "store" / file.filename();
    fs::rename(file, there);
    fs::create_symlink(there, file);
  }
  EXPECT_EQ(Run({"verify", folder_ + "/a"}), 0) << err_;
  for (const auto& entry : fs::directory_iterator(folder_ + "/a")) {
    if (entry.path().extension() != ".rank-00001") continue;
    std::fstream(entry.path(), std::ios::in | std::ios::out) << "?";
  }
  EXPECT_EQ(Run({"verify", folder_ + "/a"}), 1);
  EXPECT_THAT(err_, HasSubstr("rank-00001"));
}

// Bytes between pieces are verified, too.
TEST_F(CommandTest, VerifiesEveryByte) {
  for (const auto& entry : fs::directory_iterator(folder_ + "/b")) {
    if (entry.path().filename() == "lock") continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out);
    const auto size = static_cast<int64_t>(fs::file_size(entry.path()));
    for (int64_t at = 0; at < size; at += 29) {
      file.seekg(at);
      const int byte = file.get();
      file.seekp(at).put(static_cast<char>(byte ^ 1)).flush();
      EXPECT_EQ(Run({"verify", folder_ + "/b"}), 1) << entry.path() << at;
      file.seekp(at).put(static_cast<char>(byte)).flush();
    }
  }
  EXPECT_EQ(Run({"verify", folder_ + "/b"}), 0) << err_;
}

TEST_F(CommandTest, SaysWhatDiffers) {
  EXPECT_EQ(Run({"diff", folder_ + "/a", folder_ + "/a"}), 0);
  EXPECT_THAT(out_, HasSubstr("7 states are equal to the bit, 0 differ"));
  EXPECT_EQ(Run({"diff", folder_ + "/a", folder_ + "/b"}), 1);
  EXPECT_THAT(out_, AllOf(HasSubstr("layer1.weight value: 65 of 65 numbers "),
                          HasSubstr("0 states are equal")));
}

TEST_F(CommandTest, SaysWhatDiffersBesideNumbers) {
  Save(1, "c");
  Change("c", [](proto::CheckpointManifest* manifest) {
    auto* const tensor = manifest->mutable_storages(1)->mutable_tensors(0);
    tensor->set_sizes(0, 33);
    tensor->set_strides(0, 2);
    tensor->set_steps(7);
    *manifest->mutable_storages(0)->add_tensors() =
        manifest->storages(0).tensors(0);
    manifest->mutable_storages(0)->mutable_tensors(1)->set_name("tied");
    manifest->mutable_training()->set_loss_scale(8);
  });
  EXPECT_EQ(Run({"diff", folder_ + "/a", folder_ + "/c"}), 1);
  EXPECT_THAT(
      out_,
      AllOf(HasSubstr("layer1.weight: sizes [65] there, [33] here; strides "
                      "[1] there, [2] here; steps none there, 7 here\n"),
            HasSubstr("tied: only in " + folder_ + "/c\n"),
            HasSubstr("training: step 1  there, step 1 loss_scale: 8 here\n"),
            HasSubstr("7 states are equal to the bit, 0 differ; 3 other")));
  SaveWords("d", "one");
  SaveWords("e", "two!");
  EXPECT_EQ(Run({"diff", folder_ + "/d", folder_ + "/d"}), 0);
  EXPECT_EQ(Run({"diff", folder_ + "/d", folder_ + "/e"}), 1);
  EXPECT_THAT(out_, HasSubstr("rank 0's client_state: 3 bytes there, 4 other "
                              "bytes here\n"));
  EXPECT_EQ(Run({"diff", folder_ + "/a", folder_ + "/d", "--all"}), 1);
  EXPECT_THAT(out_, AllOf(HasSubstr("rank 0's rank: only in "),
                          HasSubstr("rank 1's rank: only in ")));
}

TEST_F(CommandTest, WhatDiffersInTheSameWayHasOneLine) {
  Save(1, "c");
  Change("c", [](proto::CheckpointManifest* manifest) {
    for (auto& storage : *manifest->mutable_storages()) {
      for (auto& tensor : *storage.mutable_tensors()) tensor.set_steps(9);
    }
  });
  const std::vector<std::string> diff = {"diff", folder_ + "/a",
                                         folder_ + "/c"};
  EXPECT_EQ(Run(diff), 1);
  EXPECT_THAT(out_, StartsWith("7 states are equal to the bit, 0 differ; "));
  EXPECT_THAT(out_, HasSubstr("layer0.weight and 2 more: steps none there, "));
  EXPECT_THAT(out_, Not(HasSubstr("layer1.weight")));
  EXPECT_EQ(Run({diff[0], diff[1], diff[2], "--all"}), 1);
  EXPECT_THAT(out_, HasSubstr("layer1.weight: steps none there, 9 here\n"));
}

TEST_F(CommandTest, AFolderOfCheckpointsMeansTheNewest) {
  EXPECT_EQ(Run({"show", folder_}), 0) << err_;
  EXPECT_THAT(out_, StartsWith("step 2, "));
  EXPECT_EQ(err_, folder_ + " stands for its newest readable checkpoint, " +
                      folder_ + "/b\n");
  EXPECT_EQ(Run({"verify", folder_, "--quiet"}), 0) << err_;
  EXPECT_EQ(err_, "");
  EXPECT_EQ(Run({"diff", folder_, folder_ + "/b"}), 0) << out_;
  EXPECT_EQ(Run({"export", folder_, folder_ + "/st"}), 0) << err_;
  std::ofstream(folder_ + "/b/manifest") << "x";
  EXPECT_EQ(Run({"show", folder_}), 0);
  EXPECT_THAT(err_, EndsWith("/a\n"));
  EXPECT_EQ(Run({"show", folder_ + "/b"}), 1);
}

TEST_F(CommandTest, ListsThreeLevels) {
  fs::create_directories(folder_ + "/runs/7/x");
  Save(3, "runs/7/c");
  Save(4, "runs/7/x/d");
  EXPECT_EQ(Run({"ls", folder_}), 0);
  EXPECT_THAT(
      out_, AllOf(HasSubstr("runs/7/c: step 3"), Not(HasSubstr("runs/7/x/d"))));
}

TEST_F(CommandTest, WhatAFileSaysIsNoCommandOfATerminal) {
  Change("a", [](proto::CheckpointManifest* manifest) {
    manifest->mutable_storages(0)->mutable_tensors(0)->set_name(
        "\x1b[2J\xC3\xBC\xC2\x9B\xFF\n");
    manifest->mutable_training()->set_libtorch("2.11\r");
    manifest->mutable_training()->set_config("{\n\x07}");
  });
  EXPECT_EQ(Run({"show", folder_ + "/a"}), 0);
  EXPECT_THAT(out_,
              AllOf(HasSubstr("  \\x1b[2J\xC3\xBC\\xc2\\x9b\\xff\\x0a [1]: "),
                    HasSubstr("libtorch 2.11\\x0d\n(--config: ")));
  EXPECT_EQ(Run({"show", folder_ + "/a", "--config"}), 0);
  EXPECT_THAT(out_, HasSubstr("libtorch 2.11\\x0d\n{\n\\x07}\n"));
  EXPECT_EQ(Run({"show", folder_ + "/\x1b"}), 1);
  EXPECT_THAT(err_, HasSubstr("/\\x1b: no such checkpoint"));
}

TEST_F(CommandTest, MakesOtherFilesAndBack) {
  const std::string a = folder_ + "/a", st = folder_ + "/st";
  EXPECT_EQ(Run({"reshard", a, folder_ + "/r", "--files=3"}), 0) << err_;
  EXPECT_THAT(
      out_, AllOf(StartsWith(folder_ + "/r: "), HasSubstr(" files in all, ")));
  EXPECT_EQ(Run({"diff", a, folder_ + "/r"}), 0) << out_;
  EXPECT_THAT(out_, HasSubstr("7 states are equal to the bit, 0 differ\n"));
  EXPECT_EQ(Run({"reshard", a, folder_ + "/r"}), 2);
  EXPECT_THAT(err_, HasSubstr("expected --files N"));
  std::ofstream(folder_ + "/rules") << "layer0.weight  first\n";
  const std::string names = "--names=" + folder_ + "/rules";
  EXPECT_EQ(Run({"export", a, st, names}), 0) << err_;
  EXPECT_EQ(Run({"import", st, folder_ + "/i", names}), 0) << err_;
  EXPECT_EQ(Run({"show", folder_ + "/i"}), 0);
  EXPECT_THAT(out_, AllOf(HasSubstr("layer0.weight [1]: value F32\n"),
                          HasSubstr("layer1.weight [65]: value BF16\n")));
  for (const auto& again : {std::vector<std::string>{"import", st, a},
                            {"reshard", folder_ + "/r", a, "--files=3"}}) {
    EXPECT_EQ(Run(again), 1);
    EXPECT_THAT(err_, HasSubstr("a: holds a checkpoint already"));
  }
  EXPECT_EQ(Run({"diff", a, folder_ + "/a"}), 0);
  for (const auto& nowhere : {std::vector<std::string>{"import", st, ""},
                              {"reshard", a, "", "--files=3"}}) {
    EXPECT_EQ(Run(nowhere), 1);
    EXPECT_THAT(err_, HasSubstr("'' cannot be the name of a folder"));
  }
  EXPECT_EQ(Run({"import", st, folder_ + "/new", "--files=3"}), 2);
  EXPECT_THAT(err_, HasSubstr("unknown flag --files"));
  EXPECT_EQ(Run({"export", a, st, "--dtype", "fp16"}), 2);
  EXPECT_THAT(err_, HasSubstr("--dtype: expected fp32 or bf16, got 'fp16'"));
}

TEST(ProgressLineTest, OnceASecondInOneLine) {
  std::ostringstream err;
  absl::Duration now;
  {
    ProgressLine line(&err, [&] { return now; });
    for (const int64_t mib : {1, 2, 3, 4}) {
      line.Show(mib << 20, 4 << 20);
      now += absl::Milliseconds(500);
    }
  }
  EXPECT_EQ(err.str(), "\r3.0 MiB of 4.0 MiB\n");
  std::ostringstream none;
  { ProgressLine line(&none); }
  EXPECT_EQ(none.str(), "");
  ProgressLine nobody_watches(nullptr, [&] { return now; });
  now += absl::Seconds(9);
  nobody_watches.Show(1, 2);
}

TEST_F(CommandTest, RemovesNothingElse) {
  std::ofstream(folder_ + "/a/notes") << "mine";
  EXPECT_EQ(Run({"rm", folder_ + "/a", "--yes"}), 0);
  EXPECT_TRUE(fs::exists(folder_ + "/a/notes"));
  EXPECT_EQ(Run({"rm", "--yes", "--quiet", folder_ + "/b"}), 0);
  EXPECT_EQ(out_ + err_, "");
  EXPECT_FALSE(fs::exists(folder_ + "/b"));
  EXPECT_EQ(Run({"rm", folder_ + "/b"}), 1);
  EXPECT_THAT(err_, HasSubstr("/b: No such file or directory"));
  // The command removes what an unfinished save has left, and nothing else.
  fs::create_directory(folder_ + "/b");
  EXPECT_EQ(Run({"rm", folder_ + "/b", "--yes"}), 1);
  EXPECT_TRUE(fs::exists(folder_ + "/b"));
  std::ofstream(folder_ + "/b/0123456789abcdef.rank-00000") << "some";
  EXPECT_EQ(Run({"rm", folder_ + "/b", "--yes"}), 0) << err_;
  EXPECT_THAT(out_, HasSubstr("/b: an unfinished save, 1 file, 4 bytes"));
  EXPECT_FALSE(fs::exists(folder_ + "/b"));
}

TEST_F(CommandTest, RemovesWhatItIsToldTo) {
  const std::string a = folder_ + "/a";
  // Nobody can be asked.
  EXPECT_EQ(Run({"rm", a}), 2);
  EXPECT_THAT(err_, AllOf(HasSubstr("/a: step 1, 196 parameters, "),
                          HasSubstr("no terminal to ask on: --yes removes")));
  for (const char* answer : {"", "n", "yeah", "Nay", kEndOfInput}) {
    Answer(answer);
    EXPECT_EQ(Run({"rm", a}), 1);
    EXPECT_EQ(out_, "");
    EXPECT_THAT(err_, HasSubstr("nothing is removed"));
    EXPECT_EQ(Run({"verify", a}), 0) << answer;
  }
  Answer(" Yes ");
  EXPECT_EQ(Run({"rm", a}), 0);
  EXPECT_THAT(err_, AllOf(HasSubstr("/a: step 1, 196 parameters, "),
                          HasSubstr(" bytes in 2 files"),
                          EndsWith("\nRemove it? [y/N] ")));
  EXPECT_THAT(out_, AllOf(HasSubstr("/a: step 1, "), EndsWith("; removed\n")));
  EXPECT_FALSE(fs::exists(a));
  // There is nothing to ask about.
  EXPECT_EQ(Run({"rm", a}), 1);
  EXPECT_THAT(err_, Not(HasSubstr("Remove it?")));
}

TEST_F(CommandTest, QuietIsAnExitStatusAlone) {
  EXPECT_EQ(Run({"verify", folder_ + "/a", "--quiet", "--json"}), 0);
  EXPECT_EQ(out_ + err_, "");
  EXPECT_EQ(Run({"diff", folder_ + "/a", folder_ + "/b", "--quiet"}), 1);
  EXPECT_EQ(out_ + err_, "");
}

TEST_F(CommandTest, WrongCommands) {
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{}, {"show"}, {"diff", "a"}, {"mend", "a"}}) {
    EXPECT_EQ(Run(args), 2);
    EXPECT_THAT(err_, HasSubstr("`tessera help checkpoint"));
  }
}

}  // namespace
}  // namespace tessera
