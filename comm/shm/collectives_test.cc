// The ranks are threads on one mapping: every size, type and way of lying in
// memory against a reference. ThreadSanitizer sees all of it (--config=tsan).
#include "comm/shm/collectives.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "comm/reduce/reduce.h"
#include "comm/shm/shm_testing.h"
#include "comm/shm/team.h"

namespace tessera::shm {
namespace {

// SplitMix64: fast, where a generator takes more time than what is tested.
struct Random {
  uint64_t operator()() {
    uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  uint64_t state;
};

// Random bytes of sane values: no NaN, sums that round.
std::string Values(ElementType type, int64_t numel, uint32_t seed) {
  Random random{seed};
  std::string bytes(numel * ElementBytes(type), '\0');
  for (int64_t i = 0; i < numel; ++i) {
    char* at = bytes.data() + i * ElementBytes(type);
    const uint64_t all = random();
    const auto bits = static_cast<uint32_t>(all >> 32);
    const float x =
        (static_cast<float>(static_cast<uint32_t>(all)) / 4e9f - 0.5f) *
        static_cast<float>(1 << bits % 12) / 16;
    uint32_t word;
    std::memcpy(&word, &x, 4);
    if (type == ElementType::kFloat32) {
      std::memcpy(at, &x, 4);
    } else if (type == ElementType::kFloat64) {
      const double y = x * 1.1;
      std::memcpy(at, &y, 8);
    } else if (type == ElementType::kBFloat16) {
      const uint16_t y = static_cast<uint16_t>(word >> 16);
      std::memcpy(at, &y, 2);
    } else if (type == ElementType::kFloat16) {
      const uint16_t y = static_cast<uint16_t>((word >> 16 & 0x8000) |
                                               (0x2c00 + bits % 0x1800));
      std::memcpy(at, &y, 2);
    } else if (type == ElementType::kBool) {
      *at = static_cast<char>(bits & 1);
    } else {
      const uint64_t y = random();
      std::memcpy(at, &y, ElementBytes(type));
    }
  }
  return bytes;
}

// The sum of several ranks' values, or their average, by the portable loops.
std::string Reduced(ElementType type, ReduceOp op,
                    const std::vector<std::string>& values) {
  std::string out(values[0].size(), '\0');
  std::vector<const void*> sources;
  for (const std::string& v : values) sources.push_back(v.data());
  ReduceInOrder(
      type, op, out.data(), sources.data(), static_cast<int>(sources.size()),
      static_cast<int64_t>(out.size()) / ElementBytes(type), Isa::kPortable);
  return out;
}

enum class Lies { kDirect, kStaged, kMixed };

// World size, where the ranks' memory lies.
class CollectivesTest : public ::testing::TestWithParam<std::tuple<int, Lies>> {
 protected:
  CollectivesTest() : host_(HostOf(std::get<0>(GetParam()))) {}
  int size() const { return host_.size(); }

  // `bytes` of a rank: in its heap, or in memory of its own.
  char* Place(int rank, int64_t bytes) {
    const Lies lies = std::get<1>(GetParam());
    const bool direct =
        lies == Lies::kDirect || (lies == Lies::kMixed && rank % 2 == 0);
    if (direct) {
      char* place = host_.heap(rank) + used_[rank] + 64;
      used_[rank] += (bytes + 127) / 64 * 64;
      return place;
    }
    owned_.push_back(std::make_unique<std::string>(bytes, '\0'));
    return owned_.back()->data();
  }
  char* PlaceOf(int rank, const std::string& value) {
    char* place = Place(rank, static_cast<int64_t>(value.size()));
    std::memcpy(place, value.data(), value.size());
    return place;
  }
  void ExpectOk(const std::function<absl::Status(int, Collectives&)>& body) {
    for (const absl::Status& status : host_.Run(body)) {
      TESSERA_EXPECT_OK(status);
    }
  }
  static std::string Text(const char* from, int64_t bytes) {
    return std::string(from, bytes);
  }

  Host& host_;
  int64_t used_[8] = {};
  std::vector<std::unique_ptr<std::string>> owned_;
};

std::vector<int64_t> Sizes(int world_size) {
  // The last goes through several windows, staged or direct.
  return {0, 1, world_size - 1, world_size + 1, 1009, 65521, 200003};
}

TEST_P(CollectivesTest, SumsOfAllTypesAndSizes) {
  for (int64_t numel : Sizes(size())) {
    for (int t = 0; t < kNumElementTypes; ++t) {
      const auto type = static_cast<ElementType>(t);
      const auto op = static_cast<ReduceOp>((t + numel) % kNumReduceOps);
      SCOPED_TRACE(absl::StrCat(numel, " ", ElementTypeName(type), " ",
                                static_cast<int>(op)));
      std::fill(std::begin(used_), std::end(used_), 0);
      owned_.clear();
      const int64_t bytes = numel * ElementBytes(type);
      std::vector<std::string> values, wholes;
      std::vector<char*> all, whole, shard;
      for (int r = 0; r < size(); ++r) {
        values.push_back(Values(type, numel, r));
        wholes.push_back(Values(type, numel * size(), 100 + r));
        all.push_back(PlaceOf(r, values[r]));
        whole.push_back(PlaceOf(r, wholes[r]));
        shard.push_back(Place(r, bytes));
      }
      // An average is each rank's own matter.
      const auto op_of = [op](int r) { return r == 0 ? ReduceOp::kSum : op; };
      ExpectOk([&](int r, Collectives& c) -> absl::Status {
        TESSERA_RETURN_IF_ERROR(c.AllReduce("all", type, all[r], numel));
        return c.ReduceScatter("", type, op_of(r), whole[r], shard[r], numel);
      });
      const std::string sum = Reduced(type, ReduceOp::kSum, values);
      const std::string of_rank_0 = Reduced(type, op_of(0), wholes);
      const std::string of_others = Reduced(type, op, wholes);
      for (int r = 0; r < size(); ++r) {
        EXPECT_TRUE(Text(all[r], bytes) == sum) << r;
        EXPECT_TRUE(Text(shard[r], bytes) ==
                    (r == 0 ? of_rank_0 : of_others).substr(r * bytes, bytes))
            << r;
        EXPECT_TRUE(Text(whole[r], bytes * size()) == wholes[r]) << r;
      }
    }
  }
}

TEST_P(CollectivesTest, MovesOfAllSizes) {
  for (int64_t bytes : Sizes(size())) {
    SCOPED_TRACE(bytes);
    std::fill(std::begin(used_), std::end(used_), 0);
    owned_.clear();
    const int root = static_cast<int>((bytes + 1) % size());
    std::vector<std::string> values;
    std::vector<char*> in, gathered, in_place, broadcast;
    std::string all;
    for (int r = 0; r < size(); ++r) {
      values.push_back(Values(ElementType::kUInt8, bytes, r));
      all += values[r];
    }
    for (int r = 0; r < size(); ++r) {
      in.push_back(PlaceOf(r, values[r]));
      gathered.push_back(Place(r, bytes * size()));
      in_place.push_back(Place(r, bytes * size()));
      std::memcpy(in_place[r] + r * bytes, values[r].data(), bytes);
      broadcast.push_back(PlaceOf(r, values[r]));
    }
    ExpectOk([&](int r, Collectives& c) -> absl::Status {
      TESSERA_RETURN_IF_ERROR(c.AllGather("", in[r], gathered[r], bytes));
      TESSERA_RETURN_IF_ERROR(
          c.AllGather("", in_place[r] + r * bytes, in_place[r], bytes));
      return c.Broadcast("", broadcast[r], bytes, root);
    });
    for (int r = 0; r < size(); ++r) {
      SCOPED_TRACE(r);
      EXPECT_TRUE(Text(gathered[r], bytes * size()) == all);
      EXPECT_TRUE(Text(in_place[r], bytes * size()) == all);
      EXPECT_TRUE(Text(broadcast[r], bytes) == values[root]);
    }
  }
}

TEST_P(CollectivesTest, Texts) {
  const std::vector<int64_t> lengths = {0, 1, 200, 2'000'003};
  for (int round = 0; round < 4; ++round) {
    auto text = [&](int r) {
      return std::string(lengths[(r + round) % 4], static_cast<char>('a' + r));
    };
    std::vector<std::vector<std::string>> got(size());
    ExpectOk([&](int r, Collectives& c) -> absl::Status {
      TESSERA_RETURN_IF_ERROR(c.Barrier("before"));
      return c.AllGatherTexts("texts", text(r), &got[r]);
    });
    for (int r = 0; r < size(); ++r) {
      for (int p = 0; p < size(); ++p) EXPECT_TRUE(got[r][p] == text(p));
    }
  }
}

// Many small ones, of ranks that are slow in turns: nobody reads what is not
// there yet, or is there no more.
TEST_P(CollectivesTest, ManyInARow) {
  constexpr int kRounds = 300;
  ExpectOk([&](int r, Collectives& c) -> absl::Status {
    std::mt19937 random(r);
    std::vector<char> whole(size() * 800'000);
    for (int round = 0; round < kRounds; ++round) {
      const int64_t bytes = round % 50 == 7 ? 800'000 : 1 + round * 13 % 4000;
      const auto fill = [&](int rank) {
        return static_cast<char>(rank * 31 + round);
      };
      std::memset(whole.data() + r * bytes, fill(r), bytes);
      if (random() % 8 == 0) std::this_thread::yield();
      TESSERA_RETURN_IF_ERROR(
          c.AllGather("", whole.data() + r * bytes, whole.data(), bytes));
      for (int p = 0; p < size(); ++p) {
        const char* row = whole.data() + p * bytes;
        if (row[0] != fill(p) || row[bytes - 1] != fill(p)) {
          return absl::InternalError(absl::StrCat("round ", round, " of ", p));
        }
      }
    }
    return absl::OkStatus();
  });
}

std::string NameOf(
    const ::testing::TestParamInfo<std::tuple<int, Lies>>& info) {
  static constexpr const char* kNames[] = {"Direct", "Staged", "Mixed"};
  return absl::StrCat("World", std::get<0>(info.param),
                      kNames[static_cast<int>(std::get<1>(info.param))]);
}

INSTANTIATE_TEST_SUITE_P(All, CollectivesTest,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 5),
                                            ::testing::Values(Lies::kDirect,
                                                              Lies::kStaged,
                                                              Lies::kMixed)),
                         NameOf);

TEST(CollectivesWay, IsDirectWhereTheOthersMapTheMemory) {
  Host host(2);
  std::vector<std::string> own(2, std::string(1 << 20, 'x'));
  host.Run([&](int r, Collectives& c) -> absl::Status {
    char* const heap = host.heap(r);
    TESSERA_RETURN_IF_ERROR(
        c.AllGather("", heap + r * (1 << 19), heap, 1 << 19));
    EXPECT_EQ(c.exchange().direct_windows(), 1);
    EXPECT_EQ(c.exchange().staged_windows(), 0);
    return c.AllGather("", own[r].data() + r * (1 << 19), own[r].data(),
                       1 << 19);
  });
  EXPECT_EQ(host.rank(0).exchange().direct_windows(), 1);
  EXPECT_EQ(host.rank(0).exchange().staged_windows(), (1 << 19) / kSlotBytes);
}

}  // namespace
}  // namespace tessera::shm
