// Safetensors made of checkpoints: every number in its place, whatever the
// shape, the pieces and the names.
#include <errno.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status_matchers.h"
#include "checkpoint/exchange/name_map.h"
#include "checkpoint/exchange/rewrite.h"
#include "checkpoint/format/sample_checkpoint_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A tensor as a file has it.
struct Read {
  std::string dtype, shape, bytes;
};

std::string Between(const std::string& text, const std::string& before,
                    const std::string& after, size_t from = 0) {
  const size_t begin = text.find(before, from) + before.size();
  return text.substr(begin, text.find(after, begin) - begin);
}

std::map<std::string, Read> ReadFile(const std::string& file) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  const std::string header = file.substr(8, length);
  std::map<std::string, Read> tensors;
  size_t covered = 0;
  for (size_t at = header.find("\":{\"dtype\""); at != std::string::npos;
       at = header.find("\":{\"dtype\"", at + 1)) {
    const size_t begin = header.rfind('"', at - 1) + 1;
    Read read;
    read.dtype = Between(header, "\"dtype\":\"", "\"", at);
    read.shape = Between(header, "\"shape\":[", "]", at);
    const std::vector<std::string> offsets =
        absl::StrSplit(Between(header, "\"data_offsets\":[", "]", at), ',');
    size_t first = 0, end = 0;
    EXPECT_TRUE(absl::SimpleAtoi(offsets[0], &first) &&
                absl::SimpleAtoi(offsets[1], &end));
    EXPECT_EQ(first, covered);
    covered = end;
    read.bytes = file.substr(8 + length + first, end - first);
    tensors[header.substr(begin, at - begin)] = std::move(read);
  }
  EXPECT_EQ(8 + length + covered, file.size());
  return tensors;
}

void AddTensor(proto::CheckpointStorage* storage, const std::string& name,
               int64_t offset, const std::vector<int64_t>& sizes,
               const std::vector<int64_t>& strides) {
  proto::CheckpointTensor* const tensor = storage->add_tensors();
  tensor->set_name(name);
  tensor->set_offset(offset);
  for (const int64_t size : sizes) tensor->add_sizes(size);
  for (const int64_t stride : strides) tensor->add_strides(stride);
}

proto::CheckpointStorage* AddStorage(proto::CheckpointManifest* head,
                                     int64_t numel, const char* dtype) {
  proto::CheckpointStorage* const storage = head->add_storages();
  storage->set_numel(numel);
  for (const char* name : {"exp_avg", "value"}) {  // in any order
    proto::CheckpointState* const state = storage->add_states();
    state->set_name(name);
    state->set_dtype(dtype);
  }
  return storage;
}

// Number i of a storage is i + 0.5, which bfloat16 has too while i is small.
std::string Numbers(int64_t begin, int64_t end) {
  std::string bytes;
  for (int64_t i = begin; i < end; ++i) {
    const float value = static_cast<float>(i) + 0.5F;
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }
  return bytes;
}

// The indices of a storage that a float tensor of a file holds.
std::vector<int64_t> IndicesOf(const Read& read) {
  std::vector<int64_t> indices;
  const size_t size = read.dtype == "F32" ? 4 : 2;
  for (size_t at = 0; at < read.bytes.size(); at += size) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 4 - size, &read.bytes[at],
                size);
    float value = 0;
    std::memcpy(&value, &bits, sizeof(value));
    indices.push_back(static_cast<int64_t>(value - 0.5F));
  }
  return indices;
}

class ExportTest : public testing::Test {
 protected:
  // Written in pieces of random lengths and order, by two "ranks".
  std::map<std::string, std::string> Export(
      const proto::CheckpointManifest& head, SafetensorsExportOptions options,
      unsigned seed) {
    MemoryDisk disk;
    auto first = SafetensorsExport::Plan("/out", head, options, &disk).value();
    auto second = SafetensorsExport::Plan("/out", head, options, &disk).value();
    TESSERA_EXPECT_OK(first.Create());
    std::mt19937 random(seed);
    struct Part {
      int storage;
      int64_t begin, end;
    };
    std::vector<Part> parts;
    for (int s = 0; s < head.storages_size(); ++s) {
      const int64_t numel = head.storages(s).numel();
      for (int64_t at = 0; at < numel;) {
        const int64_t end = std::min<int64_t>(numel, at + 1 + random() % 40);
        parts.push_back({s, at, end});
        at = end;
      }
    }
    std::shuffle(parts.begin(), parts.end(), random);
    for (const Part& part : parts) {
      TESSERA_EXPECT_OK(
          (random() % 2 == 0 ? first : second)
              .Write(part.storage, part.begin, Numbers(part.begin, part.end)));
    }
    TESSERA_EXPECT_OK(first.Sync());
    TESSERA_EXPECT_OK(second.Sync());
    TESSERA_EXPECT_OK(first.Commit());
    return disk.FilesIn("/out");
  }
};

TEST_F(ExportTest, EveryLayoutIsInRowMajorOrder) {
  proto::CheckpointManifest head;
  struct Case {
    std::string name;
    int64_t offset;
    std::vector<int64_t> sizes, strides;
  };
  const std::vector<Case> cases = {
      {"row_major", 0, {4, 5, 6}, {30, 6, 1}},
      {"transposed", 0, {7, 11}, {1, 7}},
      {"channels_last", 3, {2, 3, 4, 5}, {60, 1, 15, 3}},
      {"every_second", 1, {3, 4}, {16, 4}},
      {"expanded", 5, {3, 4}, {0, 1}},
      {"one", 2, {}, {}},
      {"ones", 2, {1, 1, 3}, {0, 7, 2}},
      {"none", 0, {4, 0}, {0, 1}},
  };
  for (const Case& one : cases) {
    AddTensor(AddStorage(&head, 130, "F32"), one.name, one.offset, one.sizes,
              one.strides);
  }
  for (const char* dtype : {"", "BF16"}) {
    for (unsigned seed = 0; seed < 20; ++seed) {
      SafetensorsExportOptions options;
      options.dtype = dtype;
      const auto files = Export(head, options, seed);
      ASSERT_EQ(files.size(), 1);
      const auto tensors = ReadFile(files.at("model.safetensors"));
      ASSERT_EQ(tensors.size(), cases.size());
      for (const Case& one : cases) {
        std::vector<int64_t> expected = {one.offset};
        for (size_t d = 0; d < one.sizes.size(); ++d) {
          std::vector<int64_t> longer;
          for (const int64_t base : expected) {
            for (int64_t k = 0; k < one.sizes[d]; ++k) {
              longer.push_back(base + k * one.strides[d]);
            }
          }
          expected = longer;
        }
        const Read& read = tensors.at(one.name);
        EXPECT_EQ(IndicesOf(read), expected) << one.name;
        EXPECT_EQ(read.shape, absl::StrJoin(one.sizes, ","));
        EXPECT_EQ(read.dtype, *dtype == '\0' ? "F32" : dtype);
      }
    }
  }
}

TEST_F(ExportTest, NamesAreMappedAndTiedTensorsAreOnce) {
  proto::CheckpointManifest head;
  proto::CheckpointStorage* const tied = AddStorage(&head, 6, "F32");
  AddTensor(tied, "token.weight", 0, {2, 3}, {3, 1});
  AddTensor(tied, "head.weight", 0, {2, 3}, {3, 1});
  AddTensor(tied, "half", 3, {3}, {1});  // another view
  AddTensor(AddStorage(&head, 6, "F32"), "blocks.0.qkv.weight", 0, {2, 3},
            {3, 1});
  AddTensor(AddStorage(&head, 6, "F32"), "blocks.11.qkv.weight", 0, {2, 3},
            {3, 1});
  AddTensor(AddStorage(&head, 1, "F32"), "rotary.table", 0, {1}, {1});
  SafetensorsExportOptions options;
  options.names = NameMap::Parse(R"(
# a comment
token.weight         wte
blocks.*.qkv.weight  h.*.c_attn   transposed
rotary.*             -
)",
                                 "rules")
                      .value();
  const auto tensors =
      ReadFile(Export(head, options, 1).at("model.safetensors"));
  std::vector<std::string> names;
  for (const auto& [name, read] : tensors) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("h.0.c_attn", "h.11.c_attn", "half", "wte"));
  EXPECT_EQ(tensors.at("h.0.c_attn").shape, "3,2");
  EXPECT_THAT(IndicesOf(tensors.at("h.0.c_attn")),
              ElementsAre(0, 3, 1, 4, 2, 5));
  EXPECT_THAT(IndicesOf(tensors.at("half")), ElementsAre(3, 4, 5));
}

TEST_F(ExportTest, LargeOnesAreSeveralFilesWithAnIndex) {
  proto::CheckpointManifest head;
  for (const char* name : {"a", "b", "c"}) {
    AddTensor(AddStorage(&head, 100, "F32"), name, 0, {100}, {1});
  }
  SafetensorsExportOptions options;
  options.max_file_bytes = 800;
  auto files = Export(head, options, 1);
  ASSERT_EQ(files.size(), 3);
  EXPECT_EQ(ReadFile(files["model-00001-of-00002.safetensors"]).size(), 2);
  EXPECT_EQ(ReadFile(files["model-00002-of-00002.safetensors"]).size(), 1);
  EXPECT_THAT(files["model.safetensors.index.json"],
              AllOf(HasSubstr("\"total_size\": 1200"),
                    HasSubstr("\"a\": \"model-00001-of-00002.safetensors\""),
                    HasSubstr("\"c\": \"model-00002-of-00002.safetensors\"")));
}

TEST_F(ExportTest, WhatCannotBeExportedIsNamed) {
  MemoryDisk disk;
  const auto refused = [&](const proto::CheckpointManifest& head,
                           SafetensorsExportOptions options) {
    return SafetensorsExport::Plan("/out", head, options, &disk)
        .status()
        .ToString();
  };
  proto::CheckpointManifest head;
  AddTensor(AddStorage(&head, 2, "F32"), "a", 0, {2}, {1});
  AddTensor(AddStorage(&head, 2, "F32"), "b", 0, {2}, {1});
  SafetensorsExportOptions options;
  options.names = NameMap::Parse("b a", "rules").value();
  EXPECT_THAT(refused(head, options), HasSubstr("one of them 'b'"));
  options.names = NameMap::Parse("b c transposed", "rules").value();
  EXPECT_THAT(refused(head, options), HasSubstr("'b' has 1 dimensions"));
  options = {};
  options.dtype = "F16";
  EXPECT_THAT(refused(head, options), HasSubstr("F16"));
  options = {};
  head.mutable_storages(0)->mutable_tensors(0)->set_complex(true);
  EXPECT_THAT(refused(head, options), HasSubstr("'a' holds complex"));
  auto* const a = head.mutable_storages(0)->mutable_tensors(0);
  a->set_complex(false);
  a->set_name("__metadata__");
  EXPECT_THAT(refused(head, options), HasSubstr("the format keeps that name"));
  a->set_name("\xFF");
  EXPECT_THAT(refused(head, options), HasSubstr("'\\377': the name is not"));
  a->set_name(std::string(17'000'000, '\1'));  // six bytes each
  EXPECT_THAT(refused(head, options), HasSubstr("the names make a header of"));
  a->set_name("a");
  // A page of a manifest, and a petabyte of files.
  for (const int64_t size : {1 << 24, 1 << 24}) {
    a->add_sizes(size);
    a->add_strides(0);
  }
  EXPECT_THAT(refused(head, options),
              AllOf(HasSubstr("'a' is [2, 16777216, 16777216], of a storage of "
                              "2 numbers"),
                    HasSubstr("by a rule 'a -'")));
  options.names = NameMap::Parse("a -", "rules").value();
  EXPECT_EQ(refused(head, options), "OK");
  options = {};
  a->clear_sizes();
  a->clear_strides();
  a->add_sizes(2);
  a->add_strides(1);
  // Nothing of a user's is replaced, and a file that lacks numbers is none.
  auto exported = SafetensorsExport::Plan("/out", head, {}, &disk).value();
  TESSERA_ASSERT_OK(exported.Create());
  EXPECT_EQ(exported.Commit().code(), absl::StatusCode::kDataLoss);
  TESSERA_ASSERT_OK(exported.Write(0, 0, Numbers(0, 2)));
  TESSERA_ASSERT_OK(exported.Write(1, 0, Numbers(0, 2)));
  TESSERA_ASSERT_OK(exported.Commit());
  EXPECT_THAT(refused(head, options), HasSubstr("holds model.safetensors"));
}

TEST_F(ExportTest, Bfloat16IsRoundedToNearestEven) {
  const std::vector<std::pair<uint32_t, uint16_t>> cases = {
      {0x3f800000, 0x3f80}, {0x3f807fff, 0x3f80}, {0x3f808000, 0x3f80},
      {0x3f808001, 0x3f81}, {0x3f818000, 0x3f82}, {0x7f7fffff, 0x7f80},
      {0xff800000, 0xff80}, {0x7f800001, 0x7fc0}, {0x80000001, 0x8000},
      {0x00018000, 0x0002},
  };
  proto::CheckpointManifest head;
  const int64_t n = static_cast<int64_t>(cases.size());
  AddTensor(AddStorage(&head, n, "F32"), "a", 0, {n}, {1});
  std::string in, expected;
  for (const auto& [from, to] : cases) {
    in.append(reinterpret_cast<const char*>(&from), sizeof(from));
    expected.append(reinterpret_cast<const char*>(&to), sizeof(to));
  }
  SafetensorsExportOptions options;
  options.dtype = "BF16";
  MemoryDisk disk;
  auto exported = SafetensorsExport::Plan("/out", head, options, &disk).value();
  TESSERA_ASSERT_OK(exported.Create());
  TESSERA_ASSERT_OK(exported.Write(0, 0, in));
  TESSERA_ASSERT_OK(exported.Commit());
  EXPECT_EQ(ReadFile(disk.FilesIn("/out")["model.safetensors"])["a"].bytes,
            expected);
}

// Whatever fails, no file is left, and so the next attempt finds none.
TEST_F(ExportTest, AFailureLeavesNoFile) {
  MemoryDisk disk;
  const SampleCheckpoint sample(1);
  bool committed = false;
  TESSERA_ASSERT_OK(sample.Save("/run/a", &disk, 1, &committed));
  SafetensorsExportOptions options;
  options.max_file_bytes = 300;  // several files
  const auto run = [&] {
    return ExportSafetensors("/run/a", "/out", options, nullptr, &disk);
  };
  int64_t fails = 0;
  for (int64_t k = 0; fails == k; ++k) {
    int64_t changes = 0;
    disk.before = [&](int64_t, const char* call) -> int64_t {
      const bool is_change = absl::string_view(call) == "write" ||
                             absl::string_view(call) == "rename" ||
                             absl::string_view(call) == "sync";
      return is_change && changes++ == k ? -EIO : 0;
    };
    const absl::Status status = run();
    disk.before = nullptr;
    if (status.ok()) break;
    ++fails;
    ASSERT_EQ(disk.FilesIn("/out").size(), 0) << k << " " << status;
  }
  EXPECT_GT(fails, 10);
  EXPECT_EQ(disk.FilesIn("/out").size(), 3);
}

TEST_F(ExportTest, OfACheckpointOfSeveralFiles) {
  MemoryDisk disk;
  const SampleCheckpoint sample(1, /*large=*/true);
  bool committed = false;
  TESSERA_ASSERT_OK(sample.Save("/run/a", &disk, 3, &committed));
  int64_t told = 0;
  TESSERA_ASSERT_OK(ExportSafetensors(
      "/run/a", "/out", {},
      [&](int64_t done, int64_t of) {
        EXPECT_LE(done, of);
        told = done == of ? of : 0;
      },
      &disk));
  const auto tensors = ReadFile(disk.FilesIn("/out")["model.safetensors"]);
  int64_t total = 0;
  for (int s = 0; s < sample.head().storages_size(); ++s) {
    const auto& storage = sample.head().storages(s);
    EXPECT_EQ(tensors.at(storage.tensors(0).name()).bytes, sample.bytes(s, 0));
    total += static_cast<int64_t>(sample.bytes(s, 0).size());
  }
  EXPECT_EQ(told, total);
}

}  // namespace
}  // namespace tessera
