// Why the function runs again to fill slots, and its graph is not used: the
// graph of forward is autograd's own, with the user's hooks, accumulators and
// edges to what comes before. Only the values in it are missing.
#include "sharding/recompute/checkpointed/frame.h"

#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/torch_guard.h"
#include "base/trace/trace.h"
#include "c10/core/InferenceMode.h"
#include "sharding/recompute/checkpointed/checkpoint_watch.h"
#include "torch/csrc/autograd/function.h"

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

// Compares strides, except those of dimensions of one element, which mean
// nothing.
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

class Frame::Saved final : public Slot {
 public:
  // `op`: the operator in which `tensor` is saved, if it is known.
  Saved(std::shared_ptr<RecomputedPart> frame, int64_t number, bool print,
        const at::Tensor& tensor, const std::optional<c10::OperatorHandle>& op)
      : Slot(std::move(frame)),
        number_(number),
        sizes_(tensor.sizes()),
        strides_(StridesOf(tensor)),
        dtype_(tensor.scalar_type()),
        device_(tensor.device()),
        op_(op) {
    // Others may be memory that nobody fills (states of a generator that an
    // operator does not use), or have none (divided among ranks).
    const bool has_values = tensor.has_storage() &&
                            tensor.layout() == at::kStrided &&
                            (tensor.is_floating_point() || tensor.is_complex());
    if (print && has_values) print_ = FingerprintOf(tensor);
  }

  int64_t number() const { return number_; }
  // How `tensor`, which was computed again, differs; "": it is as it was.
  std::string Difference(const at::Tensor& tensor,
                         absl::string_view op_name) const;

 private:
  const int64_t number_;
  const c10::DimVector sizes_, strides_;
  const at::ScalarType dtype_;
  const at::Device device_;
  const std::optional<c10::OperatorHandle> op_;
  std::optional<uint64_t> print_;
};

std::string Frame::Saved::Difference(const at::Tensor& tensor,
                                     absl::string_view op_name) const {
  const std::string name =
      absl::StrCat("tensor ", number_, " of those that autograd saves",
                   By(op_ ? op_->schema().name() : ""));
  const c10::DimVector strides = StridesOf(tensor);
  if (tensor.sizes() != at::IntArrayRef(sizes_) ||
      tensor.scalar_type() != dtype_ || tensor.device() != device_ ||
      strides.size() != strides_.size() ||
      (!strides.empty() && !SameStrides(sizes_, strides_, strides))) {
    return absl::StrCat(name, " was ",
                        Describe(sizes_, strides_, dtype_, device_),
                        " in forward and is ",
                        Describe(tensor.sizes(), strides, tensor.scalar_type(),
                                 tensor.device()),
                        By(op_name), " when it is run again");
  }
  if (print_ && FingerprintOf(tensor) != *print_) {
    return absl::StrCat(
        name, ", ", c10::toString(dtype_), " [", absl::StrJoin(sizes_, ", "),
        "], has other values when it is run again than in forward: is there "
        "randomness that does not come from the default generators, or does "
        "something change between forward and backward that it reads?");
  }
  return "";
}

Frame::Frame(const CheckpointOptions& of_region, bool compares,
             const std::vector<at::Tensor>& tensors, Rerun rerun,
             OperatorWatch* outer)
    : RecomputedPart(of_region.name),
      options(of_region),
      prints(compares && !NoValues::IsSet()),
      inputs(options, tensors, outer),
      rerun_(std::move(rerun)),
      generators_(GeneratorStates::OfDefaults(inputs.Devices())),
      autocast_(AutocastState::Capture()) {}

absl::Status Frame::Error(std::string what) const {
  return absl::InvalidArgumentError(
      absl::StrCat("[", name(),
                   "] the function of a checkpointed region must do the "
                   "same each time: ",
                   what, ForNode()));
}

std::shared_ptr<SavedSlot> Frame::AddSlot(
    const at::Tensor& tensor, const std::optional<c10::OperatorHandle>& op) {
  auto slot = std::make_shared<Saved>(shared_from_this(),
                                      static_cast<int64_t>(num_slots()), prints,
                                      tensor, op);
  Add(slot);
  return slot;
}

bool Frame::Fill(int64_t number, const at::Tensor& tensor,
                 absl::string_view op_name, Again* again) {
  const size_t all = num_slots();
  if (number >= static_cast<int64_t>(all)) {
    if (!forward_ended_) return number >= again->last;
    ThrowIfError(Error(absl::StrCat(
        "autograd saves more tensors when it is run again than the ", all,
        " of forward", By(op_name))));
  }
  const auto slot = SlotOf(static_cast<size_t>(number));
  if (slot != nullptr) {
    const std::string difference =
        static_cast<const Saved&>(*slot).Difference(tensor, op_name);
    if (!difference.empty()) ThrowIfError(Error(difference));
    if (number == again->asked) {
      again->value = Value(tensor);
    } else {
      RecomputedPart::Fill(slot.get(), tensor, again->task);
    }
  }
  return number >= again->last;
}

RecomputedPart::Value Frame::Compute(Slot* slot, int64_t task) {
  if (const std::string changed = reads.Changed(writes); !changed.empty()) {
    ThrowIfError(absl::FailedPreconditionError(
        absl::StrCat("[", name(), "] ", changed, ForNode())));
  }
  const TraceScope trace(TraceTrack::kMain, "compute again", name());
  const int64_t asked = static_cast<Saved*>(slot)->number();
  AgainWatch watch(this, {asked, LastAlive(), task, {}});
  Run(watch.Inputs(), &watch);
  CheckSaved(watch, asked);
  return watch.again().value;
}

void Frame::CheckSaved(const AgainWatch& watch, int64_t asked) {
  const auto all = static_cast<int64_t>(num_slots());
  const bool enough = options.stop_early ? watch.done() || watch.saved() > asked
                                         : watch.saved() >= all;
  if (enough) return;
  ThrowIfError(Error(absl::StrCat("autograd saved ", all,
                                  " tensors in forward and only ",
                                  watch.saved(), " when it is run again")));
}

void Frame::Run(std::vector<at::Tensor> tensors, AgainWatch* watch) {
  c10::InferenceMode no_inference(false);
  at::AutoGradMode grad(true);
  std::optional<GeneratorScope> drawing;
  if (draws_) drawing.emplace(generators_);
  const AutocastStateScope autocast(autocast_);
  const FollowScope follow;
  const WatchScope scope(watch);
  ThrowIfError(CatchTorch(
      absl::StrCat("[", name(),
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

}  // namespace tessera
