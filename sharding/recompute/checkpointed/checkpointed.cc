#include "sharding/recompute/checkpointed/checkpointed.h"

#include <utility>

#include "ATen/core/grad_mode.h"
#include "base/torch_guard.h"
#include "c10/core/InferenceMode.h"
#include "sharding/dispatch/operator_watch.h"
#include "sharding/dispatch/saved_tensors.h"
#include "sharding/dispatch/tag.h"
#include "sharding/recompute/checkpointed/checkpoint_watch.h"
#include "sharding/recompute/checkpointed/frame.h"

namespace tessera::checkpoint_internal {
namespace {

constexpr int64_t kFirstRegions = 64;

bool Compares(const CheckpointOptions& options, int64_t region) {
  switch (options.check) {
    case CheckpointOptions::Check::kAlways:
      return true;
    case CheckpointOptions::Check::kNever:
      return false;
    case CheckpointOptions::Check::kFirst:
      break;
  }
  return region < kFirstRegions;
}

void InstallOnce() {
  static const bool done = [] {
    ThrowIfError(CheckTagFallback());
    InstallSavedTensorHooks();
    return true;
  }();
  (void)done;
}

}  // namespace

bool GraphIsMade() {
  return at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
}

struct Forward::State {
  State(std::shared_ptr<Frame> f, OperatorWatch* outer)
      : frame(std::move(f)), watch(frame.get(), outer), scope(&watch) {}
  ~State() { frame->EndForward(); }

  const std::shared_ptr<Frame> frame;
  ForwardWatch watch;
  const FollowScope follow;
  const WatchScope scope;
};

Forward::Forward(const CheckpointOptions& options,
                 std::atomic<int64_t>* regions,
                 const std::vector<at::Tensor>& inputs, Rerun rerun) {
  InstallOnce();
  OperatorWatch* const outer = OperatorWatch::Current();
  auto frame = std::make_shared<Frame>(options, Compares(options, (*regions)++),
                                       inputs, std::move(rerun), outer);
  state_ = std::make_unique<State>(std::move(frame), outer);
}

Forward::~Forward() = default;

}  // namespace tessera::checkpoint_internal
