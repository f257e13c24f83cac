#include "tests/support/pairwise.h"

#include <cstdint>
#include <set>
#include <utility>

#include "gtest/gtest.h"

namespace tessera {
namespace {

// This is more than pairs that are held already can take away.
constexpr int64_t kFresh = int64_t{1} << 32;

// PairWorths says what each pair of values (axis, value, other axis, other
// value) is worth to the cell that has it: most if it is in none, and less for
// each that it is in.
class PairWorths {
 public:
  explicit PairWorths(const Choice& axes) : axes_(axes) {
    size_t pairs = 0;
    for (size_t b = 0; b < axes.size(); ++b) {
      for (size_t a = 0; a < b; ++a) {
        begin_.push_back(pairs);
        pairs += axes[a] * axes[b];
      }
    }
    worths_.assign(pairs, kFresh);
    missing_ = pairs;
  }

  size_t missing() const { return missing_; }

  // The sum over the pairs that `choice`'s value at `b` makes with those
  // before.
  int64_t OfAxis(const Choice& choice, size_t b) const {
    int64_t sum = 0;
    for (size_t a = 0; a < b; ++a) sum += worths_[IndexOf(choice, a, b)];
    return sum;
  }

  void Hold(const Choice& choice) {
    for (size_t b = 0; b < choice.size(); ++b) {
      for (size_t a = 0; a < b; ++a) {
        int64_t& worth = worths_[IndexOf(choice, a, b)];
        if (worth == kFresh) {
          worth = 0;
          --missing_;
        }
        --worth;
      }
    }
  }

 private:
  size_t IndexOf(const Choice& choice, size_t a, size_t b) const {
    return begin_[b * (b - 1) / 2 + a] + choice[a] * axes_[b] + choice[b];
  }

  const Choice axes_;
  std::vector<size_t> begin_;  // of the pairs of a and b, by b, then a
  std::vector<int64_t> worths_;
  size_t missing_ = 0;
};

struct Best {
  Choice choice;
  int64_t worth = 0;
};

// Looks through all choices that begin with the first `axis` values of
// `choice`, whose pairs are worth `worth`.
void FindBest(const Choice& axes, const PairWorths& worths,
              const std::set<Choice>& taken, size_t axis, int64_t worth,
              Choice* choice, Best* best) {
  if (axis == axes.size()) {
    const bool better = best->choice.empty() || worth > best->worth;
    if (better && taken.count(*choice) == 0) *best = {*choice, worth};
    return;
  }
  for (size_t value = 0; value < axes[axis]; ++value) {
    (*choice)[axis] = value;
    FindBest(axes, worths, taken, axis + 1,
             worth + worths.OfAxis(*choice, axis), choice, best);
  }
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
  PairWorths worths(axes);
  std::vector<Choice> chosen;
  std::set<Choice> taken;
  while (chosen.size() < count) {
    Best best;
    Choice choice(axes.size());
    FindBest(axes, worths, taken, 0, 0, &choice, &best);
    worths.Hold(best.choice);
    taken.insert(best.choice);
    chosen.push_back(best.choice);
  }
  EXPECT_EQ(worths.missing(), 0u) << "so many pairs are in no cell";
  return chosen;
}

}  // namespace tessera
