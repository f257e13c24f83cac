// Safetensors made into checkpoints: every number comes back where it was, also
// by way of other names and of matrices that are transposed there.
#include <errno.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "checkpoint/exchange/name_map.h"
#include "checkpoint/exchange/rewrite.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/format/manifest.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

struct Sample {
  std::string name, dtype;
  std::vector<int64_t> sizes;
  bool complex = false;
  std::string bytes;
};

class ImportTest : public testing::Test {
 protected:
  ImportTest() {
    std::filesystem::remove_all(dir_);
    std::filesystem::create_directories(dir_);
    std::mt19937 random(1);
    for (Sample& one : samples_) {
      int64_t numel = one.complex ? 2 : 1;
      for (int64_t size : one.sizes) numel *= size;
      one.bytes.resize(static_cast<size_t>(numel * DtypeBytes(one.dtype)));
      for (char& byte : one.bytes) byte = static_cast<char>(random());
      if (one.dtype == "BOOL") one.bytes.assign(one.bytes.size(), 1);
    }
  }

  // A checkpoint of the samples, as one rank saves it.
  absl::Status Save(const std::string& path) {
    TESSERA_ASSIGN_OR_RETURN(Saving saving,
                             Saving::Begin(path, FileSystem::Real()));
    proto::CheckpointManifest manifest;
    manifest.set_format_version(kCheckpointFormat);
    manifest.set_id(saving.id());
    TESSERA_ASSIGN_OR_RETURN(
        DataFileWriter writer,
        DataFileWriter::Create(saving.folder(), saving.id(), 0));
    for (size_t s = 0; s < samples_.size(); ++s) {
      const Sample& one = samples_[s];
      const auto numel =
          static_cast<int64_t>(one.bytes.size()) / DtypeBytes(one.dtype);
      proto::CheckpointStorage* const storage = manifest.add_storages();
      storage->set_numel(numel);
      proto::CheckpointTensor* const tensor = storage->add_tensors();
      tensor->set_name(one.name);
      tensor->set_offset(0);
      tensor->set_complex(one.complex);
      int64_t stride = numel / (one.complex ? 2 : 1);
      for (int64_t size : one.sizes) {
        stride /= std::max<int64_t>(size, 1);
        tensor->add_sizes(size);
        tensor->add_strides(stride);
      }
      proto::CheckpointState* const state = storage->add_states();
      state->set_name("value");
      state->set_dtype(one.dtype);
      if (numel == 0) continue;
      TESSERA_RETURN_IF_ERROR(
          writer.Add(static_cast<int>(s), 0, 0, numel, one.bytes));
    }
    TESSERA_ASSIGN_OR_RETURN(*manifest.add_files(), writer.Finish());
    bool committed = false;
    return saving.Commit(manifest, &committed);
  }

  void ExpectSamples(const std::string& path) {
    auto reader = CheckpointReader::Open(path, FileSystem::Real());
    TESSERA_ASSERT_OK(reader.status());
    TESSERA_EXPECT_OK(reader->Verify(1));
    EXPECT_EQ(reader->manifest().storages_size(),
              static_cast<int>(samples_.size()));
    for (int s = 0; s < reader->manifest().storages_size(); ++s) {
      const proto::CheckpointStorage& storage = reader->manifest().storages(s);
      const proto::CheckpointTensor& tensor = storage.tensors(0);
      const auto one = std::find_if(
          samples_.begin(), samples_.end(),
          [&](const Sample& o) { return o.name == tensor.name(); });
      ASSERT_NE(one, samples_.end()) << tensor.name();
      EXPECT_EQ(storage.states(0).dtype(), one->dtype);
      EXPECT_EQ(tensor.complex(), one->complex);
      EXPECT_EQ(
          std::vector<int64_t>(tensor.sizes().begin(), tensor.sizes().end()),
          one->sizes);
      std::string got(one->bytes.size(), '\0');
      if (got.empty()) continue;
      TESSERA_EXPECT_OK(
          reader->Read({{s, 0, 0, storage.numel(), got.data()}}, 1));
      EXPECT_TRUE(got == one->bytes) << tensor.name();
    }
  }

  absl::Status RoundTrip(const std::string& rules) {
    SafetensorsExportOptions options;
    TESSERA_ASSIGN_OR_RETURN(options.names, NameMap::Parse(rules, "rules"));
    options.max_file_bytes = 100'000;  // several, with an index
    TESSERA_RETURN_IF_ERROR(ExportSafetensors(
        dir_ + "/a", dir_ + "/st", options, nullptr, FileSystem::Real()));
    return ImportSafetensors(dir_ + "/st", dir_ + "/b", options.names, nullptr,
                             FileSystem::Real());
  }

  const std::string dir_ = absl::StrCat(testing::TempDir(), "import");
  std::vector<Sample> samples_ = {
      {"blocks.0.up.weight", "F32", {170, 130}, false, ""},
      // This one is too large to be transposed at once.
      {"blocks.1.up.weight", "F32", {2003, 3001}, false, ""},
      {"blocks.0.up.bias", "BF16", {33}, false, ""},
      {"scale", "F64", {}, false, ""},
      {"phase", "F32", {5, 3}, false, ""},
      {"nothing", "F32", {0, 4}, false, ""},
      {"mask", "BOOL", {7}, false, ""},
      {"count", "I64", {}, false, ""},
  };
};

TEST_F(ImportTest, WhatWasExportedComesBack) {
  TESSERA_ASSERT_OK(Save(dir_ + "/a"));
  ExpectSamples(dir_ + "/a");
  TESSERA_ASSERT_OK(RoundTrip(""));
  ExpectSamples(dir_ + "/b");
}

TEST_F(ImportTest, ByOtherNamesAndTransposed) {
  TESSERA_ASSERT_OK(Save(dir_ + "/a"));
  TESSERA_ASSERT_OK(
      RoundTrip("blocks.*.up.weight  model.*.fc  transposed\n"
                "blocks.*.up.bias    model.*.fc_bias\n"
                "scale               phase\n"
                "phase               scale\n"));
  ExpectSamples(dir_ + "/b");
}

TEST_F(ImportTest, NamesThatLeadNowhere) {
  TESSERA_ASSERT_OK(Save(dir_ + "/a"));
  // The tensor `mask` would get another name there.
  TESSERA_ASSERT_OK(RoundTrip("mask count\ncount mask"));
  const NameMap away = *NameMap::Parse("mask elsewhere", "rules");
  const absl::Status lost = ImportSafetensors(dir_ + "/st", dir_ + "/c", away,
                                              nullptr, FileSystem::Real());
  EXPECT_THAT(lost, StatusIs(absl::StatusCode::kInvalidArgument,
                             AllOf(HasSubstr("tensor 'mask'"),
                                   HasSubstr("the rules do not say"))));
  EXPECT_FALSE(CheckpointReader::Open(dir_ + "/c", FileSystem::Real()).ok());
}

TEST_F(ImportTest, WhatCannotBeTransposed) {
  TESSERA_ASSERT_OK(Save(dir_ + "/a"));
  TESSERA_ASSERT_OK(RoundTrip(""));
  EXPECT_THAT(
      ImportSafetensors(dir_ + "/st", dir_ + "/c",
                        *NameMap::Parse("m mask transposed", "rules"), nullptr,
                        FileSystem::Real()),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("is no matrix")));
}

TEST_F(ImportTest, ComplexNumbersArePairs) {
  const std::string header =
      R"({"z":{"dtype":"C64","shape":[2],"data_offsets":[0,16]}})";
  const uint64_t length = header.size();
  const std::string file = dir_ + "/one.safetensors";
  std::ofstream(file, std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), 8) << header
      << "0123456789abcdef";
  TESSERA_ASSERT_OK(ImportSafetensors(file, dir_ + "/c", NameMap(), nullptr,
                                      FileSystem::Real()));
  samples_ = {{"z", "F32", {2}, true, "0123456789abcdef"}};
  ExpectSamples(dir_ + "/c");
}

TEST_F(ImportTest, NoPipeIsWaitedFor) {
  const std::string pipe = dir_ + "/model.safetensors.index.json";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  alarm(20);  // it would wait for ever
  for (const std::string& from : {pipe, dir_}) {
    EXPECT_THAT(ImportSafetensors(from, dir_ + "/c", NameMap(), nullptr,
                                  FileSystem::Real()),
                StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(pipe)));
  }
  EXPECT_THAT(NameMap::Load(pipe).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr(pipe)));
  alarm(0);
}

// Some ten bytes of memory for each of the header would be many GiB.
TEST_F(ImportTest, AHeaderOfTooManyValues) {
  std::string header = R"({"z":{"dtype":"F32","data_offsets":[0,0],"shape":[0)";
  for (int i = 0; i < 2'000'000; ++i) header += ",0";
  header += "]}}";
  const uint64_t length = header.size();
  const std::string file = dir_ + "/one.safetensors";
  std::ofstream(file, std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), 8) << header;
  EXPECT_THAT(ImportSafetensors(file, dir_ + "/c", NameMap(), nullptr,
                                FileSystem::Real()),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("has more than 2000000 values")));
}

// Nothing is committed that could not be loaded.
TEST_F(ImportTest, ShapesThatNoManifestHas) {
  TESSERA_ASSERT_OK(Save(dir_ + "/a"));
  const std::string header =
      R"({"none":{"dtype":"F32","shape":[0,1125899906842624],)"
      R"("data_offsets":[0,0]}})";
  const uint64_t length = header.size();
  const std::string file = dir_ + "/one.safetensors";
  std::ofstream(file, std::ios::binary)
      << std::string(reinterpret_cast<const char*>(&length), 8) << header;
  EXPECT_THAT(
      ImportSafetensors(file, dir_ + "/a", NameMap(), nullptr,
                        FileSystem::Real()),
      StatusIs(absl::StatusCode::kInvalidArgument,
               AllOf(HasSubstr("tensor 'none'"), HasSubstr("is not written"))));
  ExpectSamples(dir_ + "/a");
}

// Whatever goes wrong, what was there stays.
TEST_F(ImportTest, FilesThatAreCutOffAndDisksThatAreFull) {
  TESSERA_ASSERT_OK(Save(dir_ + "/a"));
  TESSERA_ASSERT_OK(RoundTrip(""));
  const std::string file = dir_ + "/one.safetensors";
  std::ofstream(file, std::ios::binary) << "no safetensors";
  EXPECT_THAT(ImportSafetensors(file, dir_ + "/b", NameMap(), nullptr,
                                FileSystem::Real()),
              StatusIs(absl::StatusCode::kDataLoss, HasSubstr(file)));
  ExpectSamples(dir_ + "/b");
  MemoryDisk disk;
  TESSERA_ASSERT_OK(
      ImportSafetensors(dir_ + "/st", "/run/ckpt", NameMap(), nullptr, &disk));
  const uint64_t id =
      CheckpointReader::Open("/run/ckpt", &disk)->manifest().id();
  const int64_t calls = disk.calls();
  for (int64_t k = calls; k < calls + 8; ++k) {
    disk.before = [&](int64_t call, const char* what) {
      return call >= k && strcmp(what, "write") == 0 ? int64_t{-ENOSPC}
                                                     : int64_t{0};
    };
    EXPECT_FALSE(
        ImportSafetensors(dir_ + "/st", "/run/ckpt", NameMap(), nullptr, &disk)
            .ok());
    disk.before = nullptr;
    auto reader = CheckpointReader::Open("/run/ckpt", &disk);
    TESSERA_ASSERT_OK(reader.status());
    EXPECT_EQ(reader->manifest().id(), id);
    TESSERA_EXPECT_OK(reader->Verify(1));
  }
}

}  // namespace
}  // namespace tessera
