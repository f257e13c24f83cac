// Why the function runs again to fill slots, and its graph is not used: the
// graph of forward is autograd's own, with the user's hooks, accumulators and
// edges to what comes before. Only the values in it are missing.
//
// Why a value is for one graph task and handed out once: what a backward leaves
// behind would be held until the graph is gone, and one that runs beside it
// would take what the other waits for.
//
// Why autocast's cache is off when the function runs again: see
// autocast_state.h. Why a value is checked for its version: without the region
// autograd would fail where something that it saved was written afterwards.
#include "sharding/recompute/checkpointed/frame.h"

#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/torch/version_error.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "c10/core/InferenceMode.h"
#include "sharding/recompute/checkpointed/checkpoint_watch.h"
#include "torch/csrc/autograd/engine.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/graph_task.h"

namespace tessera {
namespace {

namespace autograd = torch::autograd;

// " (for node MulBackward0)", where a node runs.
std::string ForNode() {
  const auto node = autograd::get_current_node();
  return node == nullptr ? "" : absl::StrCat(" (for node ", node->name(), ")");
}

std::string By(absl::string_view op_name) {
  return op_name.empty() ? "" : absl::StrCat(" (by ", op_name, ")");
}

std::string Describe(at::IntArrayRef sizes, at::IntArrayRef strides,
                     at::ScalarType dtype, at::Device device) {
  return absl::StrCat(c10::toString(dtype), " [", absl::StrJoin(sizes, ", "),
                      "] with strides [", absl::StrJoin(strides, ", "), "] on ",
                      device.str());
}

// Those of dimensions of one element mean nothing.
bool SameStrides(at::IntArrayRef sizes, at::IntArrayRef a, at::IntArrayRef b) {
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] > 1 && a[i] != b[i]) return false;
  }
  return true;
}

c10::DimVector StridesOf(const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided) return c10::DimVector();
  return c10::DimVector(tensor.strides());
}

}  // namespace

constexpr int kTries = 8;

// ---- Slot

Slot::Slot(std::shared_ptr<Frame> frame, int64_t number,
           const at::Tensor& tensor,
           const std::optional<c10::OperatorHandle>& op)
    : frame_(std::move(frame)),
      number_(number),
      sizes_(tensor.sizes()),
      strides_(StridesOf(tensor)),
      dtype_(tensor.scalar_type()),
      device_(tensor.device()),
      op_(op) {
  // Others may be memory that nobody fills (states of a generator that an
  // operator does not use).
  const bool has_values = tensor.layout() == at::kStrided &&
                          (tensor.is_floating_point() || tensor.is_complex());
  if (frame_->prints && has_values) print_ = FingerprintOf(tensor);
}

at::Tensor Slot::Unpack() { return frame_->Unpack(this); }

void Slot::Check(const at::Tensor& tensor, absl::string_view op_name) const {
  const c10::DimVector strides = StridesOf(tensor);
  if (tensor.sizes() != at::IntArrayRef(sizes_) ||
      tensor.scalar_type() != dtype_ || tensor.device() != device_ ||
      strides.size() != strides_.size() ||
      (!strides.empty() && !SameStrides(sizes_, strides_, strides))) {
    ThrowIfError(frame_->Error(absl::StrCat(
        Name(), " was ", Describe(sizes_, strides_, dtype_, device_),
        " in forward and is ",
        Describe(tensor.sizes(), strides, tensor.scalar_type(),
                 tensor.device()),
        By(op_name), " when it is run again")));
  }
  if (print_ && FingerprintOf(tensor) != *print_) {
    ThrowIfError(frame_->Error(absl::StrCat(
        Name(), ", ", c10::toString(dtype_), " [", absl::StrJoin(sizes_, ", "),
        "], has other values when it is run again than in forward: is there "
        "randomness that does not come from the default generators, or does "
        "something change between forward and backward that it reads?")));
  }
}

std::string Slot::Name() const {
  return absl::StrCat("tensor ", number_, " of those that autograd saves",
                      By(op_ ? op_->schema().name() : ""));
}

// ---- Frame

Frame::Frame(const CheckpointOptions& of_region, bool compares,
             const std::vector<at::Tensor>& tensors, Rerun rerun,
             OperatorWatch* outer)
    : options(of_region),
      prints(compares && !NoValues::IsSet()),
      inputs(options, tensors, outer),
      rerun_(std::move(rerun)),
      rng_(RngState::Capture(inputs.Devices())),
      autocast_(AutocastState::Capture()) {}

absl::Status Frame::Error(std::string what) const {
  return absl::InvalidArgumentError(
      absl::StrCat("[", options.name,
                   "] the function of a checkpointed region must do the "
                   "same each time: ",
                   what, ForNode()));
}

std::shared_ptr<SavedSlot> Frame::AddSlot(
    const at::Tensor& tensor, const std::optional<c10::OperatorHandle>& op) {
  absl::MutexLock lock(&mutex_);
  auto slot = std::make_shared<Slot>(
      shared_from_this(), static_cast<int64_t>(slots_.size()), tensor, op);
  slots_.push_back(slot);
  return slot;
}

bool Frame::Fill(int64_t number, int64_t last, int64_t task,
                 const at::Tensor& value, absl::string_view op_name) {
  std::shared_ptr<Slot> slot;
  {
    absl::MutexLock lock(&mutex_);
    if (number < static_cast<int64_t>(slots_.size())) {
      slot = slots_[static_cast<size_t>(number)].lock();
    } else if (forward_ended_) {
      ThrowIfError(Error(absl::StrCat(
          "autograd saves more tensors when it is run again than the ",
          slots_.size(), " of forward", By(op_name))));
    }
  }
  if (slot != nullptr) {
    slot->Check(value, op_name);
    absl::MutexLock lock(&mutex_);
    slot->value_ = value;
    slot->value_version_ = value._version();
    slot->value_task_ = task;
  }
  return number >= last;
}

at::Tensor Frame::Take(Slot* slot, int64_t task) {
  absl::MutexLock lock(&mutex_);
  if (slot->value_task_ != task) slot->value_.reset();
  if (!slot->value_.defined()) return {};
  at::Tensor value = std::exchange(slot->value_, at::Tensor());
  TORCH_CHECK(value._version() == slot->value_version_,
              VersionError(value.toString(), value.sizes(),
                           slot->value_version_, value._version()),
              " [", options.name, "]");
  return value;
}

at::Tensor Frame::Unpack(Slot* slot) {
  const int64_t task = autograd::get_current_graph_task_id();
  at::Tensor value = task == -1 ? at::Tensor() : Take(slot, task);
  if (value.defined()) return value;
  // Another thread's backward over the same graph takes what is not its own.
  for (int tries = 0; tries < kTries && !value.defined(); ++tries) {
    RunAgain(*slot, task);
    value = Take(slot, task);
  }
  if (task == -1) Drop(task);
  TORCH_CHECK(value.defined(), "[", options.name,
              "] two backwards go over the same checkpointed region at a time; "
              "run them one after the other");
  return value;
}

int64_t Frame::LastAlive() {
  absl::MutexLock lock(&mutex_);
  for (size_t i = slots_.size(); i > 0; --i) {
    if (!slots_[i - 1].expired()) return static_cast<int64_t>(i) - 1;
  }
  return -1;
}

void Frame::RunAgain(const Slot& slot, int64_t task) {
  if (const std::string changed = reads.Changed(writes); !changed.empty()) {
    ThrowIfError(absl::FailedPreconditionError(
        absl::StrCat("[", options.name, "] ", changed, ForNode())));
  }
  const TraceScope trace(TraceTrack::kMain, "compute again", options.name);
  AgainWatch watch(this, LastAlive(), task);
  Run(watch.Inputs(), &watch);
  CheckSaved(slot, watch);
  DropAtTheEndOf(task);
}

void Frame::CheckSaved(const Slot& slot, const AgainWatch& watch) {
  absl::MutexLock lock(&mutex_);
  const auto all = static_cast<int64_t>(slots_.size());
  const bool enough = options.stop_early
                          ? watch.done() || watch.saved() > slot.number()
                          : watch.saved() >= all;
  if (enough) return;
  ThrowIfError(Error(absl::StrCat("autograd saved ", all,
                                  " tensors in forward and only ",
                                  watch.saved(), " when it is run again")));
}

void Frame::Run(std::vector<at::Tensor> tensors, AgainWatch* watch) {
  c10::InferenceMode no_inference(false);
  at::AutoGradMode grad(true);
  std::optional<RngScope> rng;
  if (draws_) rng.emplace(rng_);
  const AutocastStateScope autocast(autocast_);
  const FollowScope follow;
  const WatchScope scope(watch);
  ThrowIfError(CatchTorch(
      absl::StrCat("[", options.name,
                   "] the function of a checkpointed region, which backward "
                   "runs again",
                   ForNode()),
      [&] {
        try {
          rerun_(std::move(tensors));
        } catch (...) {
          // The stop, whatever the function has made of it.
          if (!watch->done() || !options.stop_early) throw;
        }
      }));
}

void Frame::Drop(int64_t task) {
  pins.Release();
  std::vector<at::Tensor> dropped;  // after the lock
  absl::MutexLock lock(&mutex_);
  for (const auto& weak : slots_) {
    const auto slot = weak.lock();
    if (slot == nullptr || slot->value_task_ != task) continue;
    dropped.push_back(std::move(slot->value_));
    slot->value_.reset();
  }
}

void Frame::DropAtTheEndOf(int64_t task) {
  if (task == -1) return;
  autograd::Engine::get_default_engine().queue_callback(
      [frame = weak_from_this(), task] {
        if (auto alive = frame.lock()) alive->Drop(task);
      });
}

}  // namespace tessera
