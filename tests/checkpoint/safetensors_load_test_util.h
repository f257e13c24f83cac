// What the tests that load safetensors share.
#ifndef TESTS_CHECKPOINT_SAFETENSORS_LOAD_TEST_UTIL_H_
#define TESTS_CHECKPOINT_SAFETENSORS_LOAD_TEST_UTIL_H_

#include <cstdint>
#include <string>
#include <utility>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "tests/support/training.h"

namespace tessera {

// The ranks' models have another seed.
inline constexpr uint64_t kFileSeed = 99;

// "path|spec", as rank functions get it.
inline std::pair<std::string, TrainingSpec> Split(absl::string_view args) {
  const std::pair<std::string, std::string> parts =
      absl::StrSplit(args, absl::MaxSplits('|', 1));
  return {parts.first, TrainingSpec::FromText(parts.second)};
}

}  // namespace tessera
#endif  // TESTS_CHECKPOINT_SAFETENSORS_LOAD_TEST_UTIL_H_
