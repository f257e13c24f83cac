// OtherAnswer: of a way of running the zoo's variants, those that it does not
// serve as it does the rest.
#ifndef TESTS_ZOO_OTHER_ANSWERS_H_
#define TESTS_ZOO_OTHER_ANSWERS_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera::zoo {

struct OtherAnswer {
  std::string text;  // a part of what some rank answers, and not "equal"
  std::string why;
  std::vector<std::string> variants;
};

// Null: the variant is served. If one that is found is served, too, the test
// fails: it does not belong here any more.
const OtherAnswer* FindOtherAnswer(absl::string_view way,
                                   absl::string_view variant);

}  // namespace tessera::zoo
#endif  // TESTS_ZOO_OTHER_ANSWERS_H_
