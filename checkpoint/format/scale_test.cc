// A checkpoint of 10,000 ranks and 100,000 tensors stays usable: its manifest
// is of megabytes, and a rank opens the files of its neighbours alone.
//
//   333 units of 300 tensors, each unit in 10,000 slices of 64 elements: rank r
//   has slice r of every unit.
#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/data_file.h"
#include "checkpoint/format/manifest.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

constexpr char kPath[] = "/ckpt";
constexpr int kRanks = 10'000, kUnits = 333, kTensors = 300, kStates = 3;
constexpr int64_t kSlice = 64, kUnitNumel = kRanks * kSlice;
constexpr int64_t kNumel = (kUnitNumel + kTensors - 1) / kTensors;
constexpr int kReader = 5000, kNear = 110;  // whose files are really there
constexpr uint64_t kId = 0x5ca1e;

struct Part {
  int storage;
  int64_t begin, end;
};

// Returns the parts of rank `rank` of so many.
std::vector<Part> PartsOf(int rank, int num_ranks) {
  const int64_t slice = (kUnitNumel + num_ranks - 1) / num_ranks;
  std::vector<Part> parts;
  for (int u = 0; u < kUnits; ++u) {
    const int64_t end = std::min((rank + 1) * slice, kUnitNumel);
    for (int64_t at = rank * slice; at < end;) {
      const int64_t tensor = at / kNumel;
      const int64_t stop = std::min(end, (tensor + 1) * kNumel);
      parts.push_back({static_cast<int>(u * kTensors + tensor),
                       at - tensor * kNumel, stop - tensor * kNumel});
      at = stop;
    }
  }
  return parts;
}

// A number that says where it belongs.
float ValueOf(int storage, int state, int64_t element) {
  return static_cast<float>((storage * 7919 + state * 31 + element) % 100'003);
}

class ScaleTest : public testing::Test {
 protected:
  using Clock = std::chrono::steady_clock;

  ScaleTest() {
    TESSERA_EXPECT_OK(Folder::Make(kPath, &disk_).status());
    manifest_.set_format_version(kCheckpointFormat);
    manifest_.set_id(kId);
    manifest_.set_step(1);
    for (int s = 0; s < kUnits * kTensors; ++s) {
      proto::CheckpointStorage* const storage = manifest_.add_storages();
      const int64_t numel =
          std::min(kNumel, kUnitNumel - (s % kTensors) * kNumel);
      storage->set_numel(numel);
      proto::CheckpointTensor* const tensor = storage->add_tensors();
      tensor->set_name(absl::StrCat("model.layers.", s / kTensors, ".experts.",
                                    s % kTensors, ".weight"));
      tensor->set_offset(0);
      tensor->add_sizes(numel);
      tensor->add_strides(1);
      tensor->set_steps(1000);
      for (const char* name : {"value", "exp_avg", "exp_avg_sq"}) {
        proto::CheckpointState* const state = storage->add_states();
        state->set_name(name);
        state->set_dtype("F32");
      }
    }
    const Folder folder = Folder::Open(kPath, &disk_).value();
    for (int r = 0; r < kRanks; ++r) {
      *manifest_.add_files() =
          std::abs(r - kReader) <= kNear ? Write(folder, r) : Describe(r);
    }
  }

  static proto::CheckpointFile Write(const Folder& folder, int rank) {
    DataFileWriter writer = DataFileWriter::Create(folder, kId, rank).value();
    std::vector<float> numbers;
    for (const Part& part : PartsOf(rank, kRanks)) {
      for (int state = 0; state < kStates; ++state) {
        numbers.clear();
        for (int64_t e = part.begin; e < part.end; ++e) {
          numbers.push_back(ValueOf(part.storage, state, e));
        }
        TESSERA_EXPECT_OK(
            writer.Add(part.storage, state, part.begin, part.end - part.begin,
                       {reinterpret_cast<const char*>(numbers.data()),
                        numbers.size() * sizeof(float)}));
      }
    }
    return writer.Finish().value();
  }

  // Returns the manifest's entry of a file that is not made here.
  static proto::CheckpointFile Describe(int rank) {
    proto::CheckpointIndex index;
    for (const Part& part : PartsOf(rank, kRanks)) {
      index.add_pieces()->set_storage(part.storage);
    }
    proto::CheckpointFile file;
    const std::string bytes = EncodeIndex(index, &file).value();
    file.set_index_offset(0);
    file.set_bytes(static_cast<int64_t>(bytes.size()));
    return file;
  }

  static double Milliseconds(Clock::time_point since) {
    return std::chrono::duration<double, std::milli>(Clock::now() - since)
        .count();
  }

  MemoryDisk disk_;
  proto::CheckpointManifest manifest_;
};

TEST_F(ScaleTest, ARankReadsWhatItNeeds) {
  Clock::time_point begin = Clock::now();
  const std::string bytes = EncodeManifest(manifest_).value();
  const double encode_ms = Milliseconds(begin);
  {
    const Folder folder = Folder::Open(kPath, &disk_).value();
    TESSERA_ASSERT_OK(folder.CreateFile(kManifestName)->WriteAt(0, bytes));
  }
  begin = Clock::now();
  auto reader = CheckpointReader::Open(kPath, &disk_);
  TESSERA_ASSERT_OK(reader.status());
  std::printf("manifest: %.1f MB, written in %.0f ms, read in %.0f ms\n",
              static_cast<double>(bytes.size()) / 1e6, encode_ms,
              Milliseconds(begin));
  EXPECT_LT(bytes.size(), 64u << 20);
  for (int num_ranks : {kRanks, kRanks - 1}) {
    const std::vector<Part> parts = PartsOf(kReader, num_ranks);
    std::vector<std::vector<float>> got;
    std::vector<WantedElements> wanted;
    int64_t wanted_bytes = 0;
    for (const Part& part : parts) {
      for (int state = 0; state < kStates; ++state) {
        got.emplace_back(static_cast<size_t>(part.end - part.begin));
        wanted.push_back({part.storage, state, part.begin, part.end,
                          reinterpret_cast<char*>(got.back().data())});
        wanted_bytes += (part.end - part.begin) * int64_t{sizeof(float)};
      }
    }
    auto fresh = CheckpointReader::Open(kPath, &disk_);
    TESSERA_ASSERT_OK(fresh.status());
    const int64_t calls = disk_.calls();
    begin = Clock::now();
    TESSERA_ASSERT_OK(fresh->Read(wanted, 1));
    const double read_ms = Milliseconds(begin);
    int64_t index_bytes = 0;
    const std::vector<int> files = fresh->MayHave(wanted);
    for (int r : files) index_bytes += manifest_.files(r).index_bytes();
    std::printf(
        "to %d ranks: %zu of %d files, %lld calls, %lld bytes of data for %lld "
        "wanted, %lld of indices, %.0f ms\n",
        num_ranks, files.size(), kRanks,
        static_cast<long long>(disk_.calls() - calls),
        static_cast<long long>(fresh->bytes_read() - index_bytes),
        static_cast<long long>(wanted_bytes),
        static_cast<long long>(index_bytes), read_ms);
    EXPECT_LE(files.size(), 50u);
    // Pieces are smaller than a block here: whole ones are read.
    EXPECT_LE(fresh->bytes_read() - index_bytes, 3 * wanted_bytes);
    for (size_t w = 0; w < wanted.size(); ++w) {
      for (int64_t e = wanted[w].begin; e < wanted[w].end; ++e) {
        ASSERT_EQ(got[w][static_cast<size_t>(e - wanted[w].begin)],
                  ValueOf(wanted[w].storage, wanted[w].state, e));
      }
    }
  }
}

}  // namespace
}  // namespace tessera
