#include "sharding/recompute/checkpointed/checkpointed_sequential.h"

#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/torch_guard.h"
#include "sharding/recompute/checkpointed/checkpointed.h"

namespace tessera {
namespace {

using torch::nn::AnyModule;

// Copies of AnyModule share the module.
struct Segment {
  std::vector<AnyModule> modules;
  at::Tensor operator()(at::Tensor x) {
    for (AnyModule& module : modules) x = module.forward(x);
    return x;
  }
};

}  // namespace

at::Tensor CheckpointedSequential(const std::vector<AnyModule>& modules,
                                  int segments, const at::Tensor& x,
                                  const SequentialOptions& options) {
  const size_t n = modules.size();
  if (segments < 1 || static_cast<size_t>(segments) > n || options.every < 1) {
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
        "[", options.each.name, "] CheckpointedSequential of ", n,
        " modules: expected segments in 1..", n, " and every >= 1, got ",
        segments, " and ", options.every)));
  }
  at::Tensor h = x;
  const auto count = static_cast<size_t>(segments);
  for (size_t s = 0; s < count; ++s) {
    Segment segment{
        {modules.begin() + static_cast<std::ptrdiff_t>(s * n / count),
         modules.begin() + static_cast<std::ptrdiff_t>((s + 1) * n / count)}};
    const bool last = s + 1 == count;
    if (s % static_cast<size_t>(options.every) != 0 ||
        (last && options.keep_last)) {
      h = segment(h);
      continue;
    }
    CheckpointOptions of_segment = options.each;
    absl::StrAppend(&of_segment.name, ".", s);
    h = Checkpointed(of_segment, segment, h);
  }
  return h;
}

at::Tensor CheckpointedSequential(const torch::nn::Sequential& modules,
                                  int segments, const at::Tensor& x,
                                  const SequentialOptions& options) {
  return CheckpointedSequential(
      std::vector<AnyModule>(modules->begin(), modules->end()), segments, x,
      options);
}

}  // namespace tessera
