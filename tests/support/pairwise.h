// Choices of values of several axes: all of them, or few of which every pair of
// values is in some.
#ifndef TESTS_SUPPORT_PAIRWISE_H_
#define TESTS_SUPPORT_PAIRWISE_H_

#include <cstddef>
#include <vector>

namespace tessera {

// A value of each axis; or how many values each has.
using Choice = std::vector<size_t>;

std::vector<Choice> AllChoices(const Choice& axes);

// `count` choices that hold every pair; if these are too few a failure of the
// test. Always the same ones.
std::vector<Choice> Pairwise(const Choice& axes, size_t count);

}  // namespace tessera
#endif  // TESTS_SUPPORT_PAIRWISE_H_
