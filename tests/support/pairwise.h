// Enumerates choices of values of several axes: all of them, or few that
// contain every pair of values.
#ifndef TESTS_SUPPORT_PAIRWISE_H_
#define TESTS_SUPPORT_PAIRWISE_H_

#include <cstddef>
#include <vector>

namespace tessera {

// One value of each axis; or the number of values of each.
using Choice = std::vector<size_t>;

std::vector<Choice> AllChoices(const Choice& axes);

// Returns `count` choices that contain every pair; fails the test if these are
// too few. Always returns the same ones.
std::vector<Choice> Pairwise(const Choice& axes, size_t count);

}  // namespace tessera
#endif  // TESTS_SUPPORT_PAIRWISE_H_
