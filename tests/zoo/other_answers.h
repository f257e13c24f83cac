// OtherAnswer lists, for a way of running the zoo's variants, those variants
// that it does not serve like the rest.
#ifndef TESTS_ZOO_OTHER_ANSWERS_H_
#define TESTS_ZOO_OTHER_ANSWERS_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera::zoo {

struct OtherAnswer {
  std::string text;  // a part of some rank's answer, other than "equal"
  std::string why;
  std::vector<std::string> variants;
};

// Returns null if the variant is served. If a listed one is served, too, the
// test fails: it no longer belongs here.
const OtherAnswer* FindOtherAnswer(absl::string_view way,
                                   absl::string_view variant);

}  // namespace tessera::zoo
#endif  // TESTS_ZOO_OTHER_ANSWERS_H_
