#include "comm/hierarchical/host_plan.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;

// "0:[0,3) 1:[3,6)".
std::string Text(const std::vector<Stop>& stops) {
  return absl::StrJoin(stops, " ", [](std::string* out, const Stop& stop) {
    absl::StrAppend(out, stop.host, ":[", stop.first, ",", stop.end, ")");
  });
}

// By host: how often it sends an element of a contribution's size.
std::vector<int> SentBy(const HostPlacement& placement,
                        const std::vector<Stop>& stops, int owner,
                        int partial_bytes) {
  std::vector<int> sent(placement.num_hosts());
  for (size_t s = 0; s < stops.size(); ++s) {
    for (int r = stops[s].first; r < stops[s].end; ++r) {
      if (placement.host_of(r) != stops[s].host) ++sent[placement.host_of(r)];
    }
    if (s + 1 < stops.size()) {
      sent[stops[s].host] += partial_bytes;
    } else if (stops[s].host != owner) {
      ++sent[stops[s].host];
    }
  }
  return sent;
}

TEST(PlacementTest, HostsAreNumberedByTheirFirstRank) {
  const HostPlacement placement({7, 3, 7, 3, 3});
  EXPECT_EQ(placement.num_hosts(), 2);
  EXPECT_THAT(placement.ranks_of(0), ElementsAre(0, 2));
  EXPECT_THAT(placement.ranks_of(1), ElementsAre(1, 3, 4));
  EXPECT_EQ(placement.host_of(4), 1);
  EXPECT_EQ(placement.local_rank_of(4), 2);
  EXPECT_EQ(placement.Lane(1, 5), 4);
}

TEST(PlanSumTest, PartialSumsTravelWhereHostsHaveManyRanks) {
  const HostPlacement placement({0, 0, 0, 1, 1, 1});
  EXPECT_EQ(Text(PlanSum(placement, 1, 1)), "0:[0,3) 1:[3,6)");
  EXPECT_EQ(Text(PlanSum(placement, 0, 1)), "0:[0,3) 1:[3,6)");
  // In float32 they are larger than what they are sums of.
  EXPECT_EQ(Text(PlanSum(HostPlacement({0, 0, 1, 1}), 0, 2)), "0:[0,4)");
}

TEST(PlanSumTest, ContributionsTravelWhereRanksAlternate) {
  const HostPlacement placement({0, 1, 0, 1});
  EXPECT_EQ(Text(PlanSum(placement, 0, 1)), "0:[0,4)");
  EXPECT_EQ(Text(PlanSum(placement, 1, 1)), "1:[0,4)");
  EXPECT_EQ(Text(PlanSum(HostPlacement({0, 0, 0, 1}), 0, 1)), "0:[0,4)");
}

TEST(PlanSumTest, EveryRankIsAddedOnceAndInOrder) {
  for (int code = 0; code < 3 * 3 * 3 * 3 * 3 * 3; ++code) {
    std::vector<int> hosts;
    for (int rest = code, r = 0; r < 6; ++r, rest /= 3) {
      hosts.push_back(rest % 3);
    }
    const HostPlacement placement(hosts);
    for (int owner = 0; owner < placement.num_hosts(); ++owner) {
      for (int partial_bytes : {1, 2}) {
        int next = 0, before = -1;
        for (const Stop& stop : PlanSum(placement, owner, partial_bytes)) {
          EXPECT_EQ(stop.first, next);
          EXPECT_NE(stop.host, before);
          next = stop.end;
          before = stop.host;
        }
        EXPECT_EQ(next, 6) << absl::StrJoin(hosts, " ");
      }
    }
  }
}

// Where the ranks of a host follow each other: of a tensor of one slice for
// each rank, in tensors.
TEST(PlanSumTest, WhatAHostSendsDoesNotGrowWithItsRanks) {
  for (int num_hosts = 2; num_hosts <= 4; ++num_hosts) {
    for (int each = 2; each <= 16; ++each) {
      std::vector<int> hosts;
      for (int r = 0; r < num_hosts * each; ++r) hosts.push_back(r / each);
      const HostPlacement placement(hosts);
      for (int partial_bytes : {1, 2}) {
        std::vector<double> sent(num_hosts);
        for (int owner = 0; owner < num_hosts; ++owner) {
          const std::vector<int> of_slice =
              SentBy(placement, PlanSum(placement, owner, partial_bytes), owner,
                     partial_bytes);
          for (int h = 0; h < num_hosts; ++h) {
            sent[h] += static_cast<double>(of_slice[h]) / num_hosts;
          }
        }
        EXPECT_LE(*std::max_element(sent.begin(), sent.end()), partial_bytes)
            << num_hosts << " hosts of " << each;
      }
    }
  }
}

TEST(LayoutTest, PiecesCoverTheTensorOnce) {
  for (int num_slices : {1, 2, 5, 8, 9, 20}) {
    std::vector<OwnedSlice> slices;
    int64_t end = 0;
    for (int p = 0; p < num_slices; ++p) {
      const int64_t bytes = p % 4 == 3 ? 0 : 100 + 13 * p;
      slices.push_back({end, bytes, p});
      end += bytes;
    }
    const Layout layout(slices);
    std::vector<int> covered(end);
    for (int64_t k = 0; k < layout.NumWindows(64); ++k) {
      for (const Piece& piece : layout.PiecesOf(k, 64)) {
        EXPECT_LE(piece.place + piece.bytes, 64);
        EXPECT_GE(piece.begin, slices[piece.slice].begin);
        for (int64_t i = 0; i < piece.bytes; ++i) ++covered[piece.begin + i];
      }
    }
    EXPECT_THAT(covered, testing::Each(1)) << num_slices;
  }
}

}  // namespace
}  // namespace tessera
