#include "optim/factored/boxes.h"

#include <set>

#include "gtest/gtest.h"

namespace tessera {
namespace {

using Sizes = std::vector<int64_t>;

// Places in memory, each as often as boxes have it.
std::multiset<int64_t> PlacesIn(const Box& box, const Sizes& strides) {
  std::multiset<int64_t> places = {0};
  for (size_t d = 0; d < strides.size(); ++d) {
    std::multiset<int64_t> next;
    for (const int64_t place : places) {
      for (int64_t i = 0; i < box.sizes[d]; ++i) {
        next.insert(place + (box.begins[d] + i) * strides[d]);
      }
    }
    places = std::move(next);
  }
  return places;
}

void ExpectCoversEachRun(const Sizes& sizes, const Sizes& strides) {
  int64_t numel = 1;
  size_t most_boxes = 1;
  for (const int64_t size : sizes) {
    numel *= size;
    most_boxes += size > 1 ? 2 : 0;
  }
  for (int64_t begin = 0; begin <= numel; ++begin) {
    for (int64_t end = begin; end <= numel; ++end) {
      std::multiset<int64_t> expected;
      for (int64_t i = begin; i < end; ++i) expected.insert(i);
      for (const int64_t most : {int64_t{1}, int64_t{7}, numel}) {
        std::multiset<int64_t> got;
        const auto boxes = BoxesOf(sizes, strides, {begin, end}, most);
        for (const Box& box : boxes) {
          const auto places = PlacesIn(box, strides);
          EXPECT_LE(places.size(), static_cast<size_t>(most));
          got.insert(places.begin(), places.end());
        }
        ASSERT_EQ(got, expected) << begin << " to " << end;
        if (most == numel) EXPECT_LE(boxes.size(), most_boxes);
      }
    }
  }
}

TEST(BoxesTest, CoverEachRunOnce) {
  ExpectCoversEachRun({}, {});
  ExpectCoversEachRun({11}, {1});
  ExpectCoversEachRun({5, 7}, {7, 1});
  ExpectCoversEachRun({5, 7}, {1, 5});
  ExpectCoversEachRun({3, 2, 5}, {10, 5, 1});
  ExpectCoversEachRun({3, 2, 5}, {1, 15, 3});
  // Strides of dims of one element may be anything.
  ExpectCoversEachRun({1, 6, 1}, {1, 1, 99});
}

TEST(BoxesTest, AreFew) {
  EXPECT_EQ(BoxesOf({100, 10}, {10, 1}, {0, 1000}, 1000).size(), 1u);
  EXPECT_EQ(BoxesOf({100, 10}, {10, 1}, {3, 998}, 1000).size(), 3u);
}

}  // namespace
}  // namespace tessera
