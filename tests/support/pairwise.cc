#include "tests/support/pairwise.h"

#include <map>
#include <set>
#include <utility>

#include "gtest/gtest.h"

namespace tessera {
namespace {

// Pairs of values (axis, value, other axis, other value) of a cell.
std::set<std::vector<size_t>> PairsOf(const Choice& choice) {
  std::set<std::vector<size_t>> pairs;
  for (size_t a = 0; a < choice.size(); ++a) {
    for (size_t b = a + 1; b < choice.size(); ++b) {
      pairs.insert({a, choice[a], b, choice[b]});
    }
  }
  return pairs;
}

}  // namespace

std::vector<Choice> AllChoices(const Choice& axes) {
  std::vector<Choice> all = {{}};
  for (size_t size : axes) {
    std::vector<Choice> longer;
    for (const Choice& choice : all) {
      for (size_t value = 0; value < size; ++value) {
        longer.push_back(choice);
        longer.back().push_back(value);
      }
    }
    all = std::move(longer);
  }
  return all;
}

// Each time the one with most pairs that were not yet held, then with fewest
// cells of its kind.
std::vector<Choice> Pairwise(const Choice& axes, size_t count) {
  const std::vector<Choice> all = AllChoices(axes);
  std::set<std::vector<size_t>> missing;
  for (const Choice& choice : all) missing.merge(PairsOf(choice));
  std::map<std::vector<size_t>, int> held;
  std::vector<Choice> chosen;
  std::set<Choice> taken;
  while (chosen.size() < count) {
    const Choice* best = nullptr;
    std::pair<int, int> best_score;
    for (const Choice& choice : all) {
      if (taken.count(choice) > 0) continue;
      int fresh = 0, seen = 0;
      for (const auto& pair : PairsOf(choice)) {
        fresh += static_cast<int>(missing.count(pair));
        seen += held[pair];
      }
      const std::pair<int, int> score = {fresh, -seen};
      if (best == nullptr || score > best_score) {
        best = &choice;
        best_score = score;
      }
    }
    for (const auto& pair : PairsOf(*best)) {
      missing.erase(pair);
      ++held[pair];
    }
    taken.insert(*best);
    chosen.push_back(*best);
  }
  EXPECT_TRUE(missing.empty()) << missing.size() << " pairs are in no cell";
  return chosen;
}

}  // namespace tessera
