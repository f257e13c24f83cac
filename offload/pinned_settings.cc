#include "offload/pinned_settings.h"

#include <sched.h>

#include <algorithm>
#include <vector>

#include "ATen/detail/CUDAHooksInterface.h"
#include "absl/numeric/bits.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/torch_guard.h"
#include "c10/core/AllocatorConfig.h"

namespace tessera {
namespace {

constexpr char kRegister[] = "pinned_use_cuda_host_register";
constexpr char kThreads[] = "pinned_num_register_threads";
constexpr int kMostThreads = 8;  // more were no faster where libtorch measured

int UsableProcessors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

std::string PinnedSettings(absl::string_view now, int processors) {
  std::vector<std::string> settings =
      absl::StrSplit(now, ',', absl::SkipWhitespace());
  const auto has = [&](absl::string_view key) {
    return std::any_of(
        settings.begin(), settings.end(), [&](const std::string& each) {
          const std::vector<std::string> parts = absl::StrSplit(each, ':');
          return absl::StripAsciiWhitespace(parts[0]) == key;
        });
  };
  if (has(kRegister)) return "";
  const bool has_threads = has(kThreads);
  settings.push_back(absl::StrCat(kRegister, ":True"));
  if (!has_threads) {  // a power of two, as libtorch demands
    const auto most =
        static_cast<unsigned>(std::clamp(processors, 1, kMostThreads));
    settings.push_back(absl::StrCat(kThreads, ":", absl::bit_floor(most)));
  }
  return absl::StrJoin(settings, ",");
}

// Without CUDA its keys are unknown, and libtorch would throw.
void SetPinnedSettings() {
  (void)CatchTorch("settings of pinned memory", [] {
    if (!at::detail::getCUDAHooks().hasCUDA()) return;
    const std::string settings = PinnedSettings(
        c10::CachingAllocator::getAllocatorSettings(), UsableProcessors());
    if (!settings.empty()) {
      c10::CachingAllocator::setAllocatorSettings(settings);
    }
  });
}

}  // namespace tessera
