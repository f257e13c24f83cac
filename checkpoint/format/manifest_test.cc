// Tests that what a manifest or an index says is believed only if it is
// possible.
#include "checkpoint/format/manifest.h"

#include <cstdint>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kPath[] = "run/manifest";

// One storage of 100 elements in two states, one file.
proto::CheckpointManifest Good() {
  proto::CheckpointManifest manifest;
  manifest.set_format_version(kCheckpointFormat);
  manifest.set_id(0x12);
  proto::CheckpointStorage* const storage = manifest.add_storages();
  storage->set_numel(100);
  proto::CheckpointTensor* const tensor = storage->add_tensors();
  tensor->set_name("weight");
  tensor->set_offset(10);
  for (int64_t size : {9, 10}) tensor->add_sizes(size);
  for (int64_t stride : {10, 1}) tensor->add_strides(stride);
  for (const char* name : {"value", "exp_avg"}) {
    proto::CheckpointState* const state = storage->add_states();
    state->set_name(name);
    state->set_dtype("F32");
  }
  proto::CheckpointFile* const file = manifest.add_files();
  file->set_bytes(1000);
  file->set_index_offset(900);
  file->set_index_bytes(100);
  for (int64_t step : {0, 1}) file->add_storage_ranges(step);
  return manifest;
}

TEST(ManifestTest, ReadsWhatWasWritten) {
  const auto read = DecodeManifest(EncodeManifest(Good()).value(), kPath);
  TESSERA_ASSERT_OK(read.status());
  EXPECT_EQ(read->SerializeAsString(), Good().SerializeAsString());
}

TEST(ManifestTest, CutOffOrWithMoreBehind) {
  const std::string bytes = EncodeManifest(Good()).value();
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_THAT(DecodeManifest(bytes.substr(0, n), kPath).status(),
                StatusIs(absl::StatusCode::kDataLoss, HasSubstr(kPath)));
  }
  EXPECT_THAT(DecodeManifest("tsr chpt", kPath).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(DecodeManifest("notes", kPath).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition));
  EXPECT_THAT(DecodeManifest(bytes + "x", kPath).status(),
              StatusIs(absl::StatusCode::kDataLoss));
}

TEST(ManifestTest, OfAnotherFormat) {
  proto::CheckpointManifest manifest = Good();
  manifest.set_format_version(2);
  EXPECT_THAT(
      DecodeManifest(EncodeManifest(manifest).value(), kPath).status(),
      StatusIs(absl::StatusCode::kFailedPrecondition,
               AllOf(HasSubstr("format 2"), HasSubstr("reads format 1"))));
}

struct Case {
  const char* name;
  std::function<void(proto::CheckpointManifest*)> change;
};

TEST(ManifestTest, WhatCannotBe) {
  constexpr int64_t kHuge = INT64_MAX / 2;
  const Case cases[] = {
      {"numel", [](auto* m) { m->mutable_storages(0)->set_numel(99); }},
      {"negative numel",
       [](auto* m) { m->mutable_storages(0)->set_numel(-1); }},
      {"huge numel", [](auto* m) { m->mutable_storages(0)->set_numel(kHuge); }},
      {"no tensor", [](auto* m) { m->mutable_storages(0)->clear_tensors(); }},
      {"offset",
       [](auto* m) {
         m->mutable_storages(0)->mutable_tensors(0)->set_offset(-1);
       }},
      {"size",
       [](auto* m) {
         m->mutable_storages(0)->mutable_tensors(0)->set_sizes(0, -1);
       }},
      {"overflow",
       [](auto* m) {
         auto* tensor = m->mutable_storages(0)->mutable_tensors(0);
         tensor->set_sizes(0, int64_t{1} << 47);
         tensor->set_strides(0, int64_t{1} << 47);
       }},
      {"strides",
       [](auto* m) {
         m->mutable_storages(0)->mutable_tensors(0)->add_strides(1);
       }},
      {"complex",
       [](auto* m) {
         m->mutable_storages(0)->mutable_tensors(0)->set_complex(true);
       }},
      {"dtype",
       [](auto* m) {
         m->mutable_storages(0)->mutable_states(0)->set_dtype("F31");
       }},
      {"two tensors of a name",
       [](auto* m) {
         auto* const other = m->add_storages();
         *other = m->storages(0);
       }},
      {"two tensors of a name in a storage",
       [](auto* m) {
         auto* const storage = m->mutable_storages(0);
         *storage->add_tensors() = storage->tensors(0);
       }},
      {"two states of a name",
       [](auto* m) {
         m->mutable_storages(0)->mutable_states(1)->set_name("value");
       }},
      {"product of sizes",
       [](auto* m) {
         auto* tensor = m->mutable_storages(0)->mutable_tensors(0);
         for (int d : {0, 1}) {
           tensor->set_sizes(d, int64_t{1} << 25);
           tensor->set_strides(d, 0);
         }
       }},
      {"product of sizes of none",
       [](auto* m) {
         auto* tensor = m->mutable_storages(0)->mutable_tensors(0);
         for (int d : {0, 1}) {
           tensor->set_sizes(d, int64_t{1} << 40);
           tensor->set_strides(d, 0);
         }
         tensor->add_sizes(0);
         tensor->add_strides(1);
       }},
      {"sum of storages",
       [](auto* m) {
         for (int s = 0; s < 300; ++s) {
           auto* const other = m->add_storages();
           other->set_numel(int64_t{1} << 48);
           other->add_tensors()->set_name(absl::StrCat("other", s));
         }
       }},
      {"sum of files",
       [](auto* m) {
         for (int r = 0; r < 300; ++r) {
           m->add_files()->set_bytes(int64_t{1} << 48);
         }
       }},
      {"index offset",
       [](auto* m) { m->mutable_files(0)->set_index_offset(901); }},
      {"index bytes",
       [](auto* m) { m->mutable_files(0)->set_index_bytes(kHuge); }},
      {"range", [](auto* m) { m->mutable_files(0)->set_storage_ranges(1, 2); }},
      {"negative range",
       [](auto* m) { m->mutable_files(0)->set_storage_ranges(0, -1); }},
      {"no file", [](auto* m) { m->clear_files(); }},
      {"half a range",
       [](auto* m) { m->mutable_files(0)->add_storage_ranges(0); }},
  };
  for (const Case& c : cases) {
    proto::CheckpointManifest manifest = Good();
    c.change(&manifest);
    EXPECT_THAT(
        DecodeManifest(EncodeManifest(manifest).value(), kPath).status(),
        StatusIs(absl::StatusCode::kDataLoss, HasSubstr(kPath)))
        << c.name;
  }
}

// The index has elements 10 to 20 of "exp_avg".
proto::CheckpointIndex GoodIndex() {
  proto::CheckpointIndex index;
  proto::CheckpointPiece* const piece = index.add_pieces();
  piece->set_storage(0);
  piece->set_state(1);
  piece->set_begin(10);
  piece->set_end(20);
  piece->set_offset(64);
  piece->add_block_crcs(1);
  return index;
}

absl::Status Read(const proto::CheckpointIndex& index) {
  proto::CheckpointManifest manifest = Good();
  manifest.mutable_files(0)->clear_storage_ranges();
  const std::string bytes =
      EncodeIndex(index, manifest.mutable_files(0)).value();
  return DecodeIndex(bytes, manifest, 0, "a file").status();
}

TEST(IndexTest, PiecesLieInTheirStorageAndInTheFile) {
  TESSERA_EXPECT_OK(Read(GoodIndex()));
  using Change = std::function<void(proto::CheckpointIndex*)>;
  const Change changes[] = {
      [](auto* i) { i->mutable_pieces(0)->set_storage(1); },
      [](auto* i) { i->mutable_pieces(0)->set_storage(-1); },
      [](auto* i) { i->mutable_pieces(0)->set_state(2); },
      [](auto* i) { i->mutable_pieces(0)->set_end(10); },
      [](auto* i) { i->mutable_pieces(0)->set_end(101); },
      [](auto* i) { i->mutable_pieces(0)->set_begin(-1); },
      [](auto* i) { i->mutable_pieces(0)->set_offset(-64); },
      [](auto* i) { i->mutable_pieces(0)->set_offset(861); },
      [](auto* i) { i->mutable_pieces(0)->set_offset(INT64_MAX); },
      [](auto* i) { i->mutable_pieces(0)->add_block_crcs(1); },
      [](auto* i) { *i->add_pieces() = i->pieces(0); },  // over the first
  };
  for (const Change& change : changes) {
    proto::CheckpointIndex index = GoodIndex();
    change(&index);
    EXPECT_THAT(Read(index), StatusIs(absl::StatusCode::kDataLoss,
                                      HasSubstr("a file is damaged")))
        << index.ShortDebugString();
  }
}

// A reader of one storage would not find it, though the whole file verifies.
TEST(IndexTest, HasOnlyStoragesThatTheManifestKnowsOf) {
  proto::CheckpointManifest manifest = Good();
  proto::CheckpointFile* const file = manifest.mutable_files(0);
  file->clear_storage_ranges();
  const std::string bytes = EncodeIndex(GoodIndex(), file).value();
  TESSERA_EXPECT_OK(DecodeIndex(bytes, manifest, 0, "a file").status());
  file->set_storage_ranges(1, 0);  // [0, 0)
  EXPECT_THAT(DecodeIndex(bytes, manifest, 0, "a file").status(),
              StatusIs(absl::StatusCode::kDataLoss,
                       HasSubstr("the manifest says that it has none")));
}

TEST(IndexTest, SaysWhichStoragesItHas) {
  proto::CheckpointIndex index;
  for (int storage : {7, 3, 4, 4, 9}) {
    index.add_pieces()->set_storage(storage);
  }
  proto::CheckpointFile file;
  TESSERA_ASSERT_OK(EncodeIndex(index, &file).status());
  // The ranges are [3, 5), [7, 8) and [9, 10).
  EXPECT_THAT(file.storage_ranges(), ElementsAre(3, 2, 2, 1, 1, 1));
}

TEST(NamesTest, OnlyOurs) {
  EXPECT_EQ(DataFileName(0xabc, 3), "0000000000000abc.rank-00003");
  EXPECT_EQ(IdInName(DataFileName(0xabc, 123456)), 0xabcu);
  EXPECT_EQ(IdInName(TemporaryManifestName(~uint64_t{0})), ~uint64_t{0});
  for (const char* name :
       {"", "manifest", "lock", "0000000000000abc", "0000000000000abc.rank-",
        "0000000000000abc.rank-3", "0000000000000ABC.rank-00003",
        "0000000000000abc.rank--0003", "0x00000000000abc.rank-00003",
        "0000000000000abc.manifest2", "0000000000000abc.rank-00003~"}) {
    EXPECT_EQ(IdInName(name), std::nullopt) << name;
  }
}

}  // namespace
}  // namespace tessera
