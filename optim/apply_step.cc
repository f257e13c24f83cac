#include "optim/apply_step.h"

#include <utility>
#include <vector>

#include "ATen/ops/empty.h"
#include "base/status.h"
#include "base/stream/side_stream.h"
#include "base/torch/tensor_over.h"
#include "base/trace/trace.h"
#include "c10/core/StreamGuard.h"
#include "offload/shard_states.h"
#include "optim/step_scalars.h"

namespace tessera {
namespace {

// Where the elements of one state are found, and where new ones are left.
struct Place {
  TieredBuffer* buffer = nullptr;  // null: memory that is no state
  HostElements now;                // undefined: they come with each slice
  HostElements next;               // undefined: new ones replace those of now
  size_t number = 0;               // in the slice's data

  bool streamed() const { return buffer != nullptr && buffer->on_disk(); }
  void Wait() const {
    if (now.elements.defined()) now.Wait();
    if (next.elements.defined()) next.Wait();
  }
  at::Tensor Now(Range slice, const std::vector<char*>& data) const {
    if (!streamed()) return now.Part(slice);
    const ElementFormat& format = buffer->format();
    return TensorOver(data[number], {format.TensorNumel(slice.numel())}, {1},
                      format.dtype, at::kCPU);
  }
  at::Tensor Next(Range slice) const {
    return next.elements.defined() ? next.Part(slice) : at::Tensor();
  }
  // Returns what a kernel is to change in place: new elements begin as those of
  // now.
  at::Tensor ToChange(Range slice, const std::vector<char*>& data) const {
    const at::Tensor elements = Now(slice, data);
    const at::Tensor changed = Next(slice);
    return changed.defined() ? changed.copy_(elements) : elements;
  }
};

class SliceStep {
 public:
  SliceStep(FlatParameter* flat, const UnitStep& step, SliceStepOptions options)
      : flat_(*flat),
        states_(flat->states()),
        step_(step),
        options_(std::move(options)),
        after_(StreamPoint::Now(flat->device())) {
    Find();
  }

  std::vector<StreamedUpdate::State> Streamed() const { return streamed_; }

  // On the stream's thread, all of them.
  absl::Status Compute(Range slice, const std::vector<char*>& data) {
    if (slice.begin == 0) Begin();
    if (!taken_) {
      if (skip_) {
        Skip(slice, data);
      } else {
        Step(slice, data);
      }
    }
    if (options_.early && options_.host != nullptr) {
      options_.host->made = slice.end == flat_.owned().numel();
    }
    if (skip_ || !options_.on_device.defined()) return absl::OkStatus();
    return Send(slice.end);
  }

  StreamPoint End() const {
    if (skip_ || !options_.on_device.defined()) return {};
    const c10::StreamGuard guard(SideStream(flat_.device()));
    return StreamPoint::Now(flat_.device());
  }

 private:
  // Sends the new values before `end` that are not sent yet to the device, once
  // they are enough. Each copy costs several calls of the driver, and a small
  // one does not use the whole bus.
  absl::Status Send(int64_t end) {
    const bool all = end == flat_.owned().numel();
    if (!all && end - sent_ < kLeastUploadNumel) return absl::OkStatus();
    const Range piece{std::exchange(sent_, end), end};
    const c10::StreamGuard guard(SideStream(flat_.device()));
    const Place& from = has_working_ ? working_ : masters_;
    return from.buffer->CopyTo(piece, Slice(options_.on_device, piece));
  }

  // For a unit on a device, a shard in the device's memory is written by copies
  // from the host.
  TieredBuffer* WorkingBuffer() {
    TieredBuffer* const shard = states_.separate_working();
    if (!flat_.updated_on_host() || (shard != nullptr && shard->elsewhere())) {
      return shard;
    }
    TieredBuffer& staged = states_.At(ShardStates::kNewValues);
    return staged.defined() ? &staged : nullptr;
  }

  void Find() {
    streamed_.clear();
    moments_.clear();
    for (TieredBuffer& moment : states_.moments()) {
      moments_.push_back(PlaceOf(&moment, /*read=*/true, /*written=*/true));
    }
    masters_ = PlaceOf(&states_.value(), /*read=*/true, /*written=*/true);
    TieredBuffer* const working = WorkingBuffer();
    has_working_ = working != nullptr;
    // All of it is written, from the masters.
    if (has_working_) working_ = PlaceOf(working, false, /*written=*/true);
    if (options_.next != nullptr) {
      (masters_.streamed() ? working_ : masters_).next = {
          options_.next->View(), {}, {}, options_.next->dtype()};
    }
    if (options_.gradient.defined()) {
      gradient_.now = {
          options_.gradient, {}, {}, options_.gradient.scalar_type()};
    } else {
      gradient_ = PlaceOf(&states_.At(ShardStates::kGradient), /*read=*/true,
                          /*written=*/false);
    }
  }

  Place PlaceOf(TieredBuffer* buffer, bool read, bool written) {
    Place place;
    place.buffer = buffer;
    place.number = streamed_.size();
    if (buffer->on_disk()) {
      streamed_.push_back({buffer, read, written});
    } else if (buffer->on_host()) {
      place.now = buffer->Host();
      if (options_.early && written && buffer->next().defined()) {
        place.next = buffer->next().Host();
      }
    } else {
      place.now = {buffer->View(), {}, {}, buffer->format()};
    }
    return place;
  }

  void Begin() {
    if (options_.factor.has_value()) {
      if (options_.on_device.defined()) {
        const c10::StreamGuard guard(SideStream(flat_.device()));
        after_.Order();
      }
      const HostFactor::Value value = options_.factor->Wait();
      skip_ = value.skip;
      step_.SetFactor(value.factor);
      const EarlyHost* const early = options_.host.get();
      if (early != nullptr && early->made && !skip_ &&
          early->factor == value.factor) {
        taken_ = true;  // it was the right one
        ++*early->taken;
        states_.SwapNext();
        return;
      }
      Find();  // the step before may have swapped them
    }
    for (const Place& moment : moments_) moment.Wait();
    masters_.Wait();
    if (has_working_) working_.Wait();
    gradient_.Wait();
  }

  // What is on a disk is written anyway.
  void Skip(Range slice, const std::vector<char*>& data) const {
    if (!has_working_ || !working_.streamed()) return;
    working_.Now(slice, data).copy_(masters_.Now(slice, data));
  }

  // A kernel leaves out the working copy of what it does not step, which only
  // memory of the processor's units has already.
  void Step(Range slice, const std::vector<char*>& data) const {
    const bool elsewhere = step_.writes_elsewhere();
    StepTensors tensors;
    if (elsewhere) {
      tensors.masters = masters_.Now(slice, data);
      tensors.new_masters = masters_.Next(slice);
    } else {
      tensors.masters = masters_.ToChange(slice, data);
    }
    for (size_t m = 0; m < moments_.size(); ++m) {
      const Place& moment = moments_[m];
      const at::Tensor now = moment.Now(slice, data);
      // Several elements of 8 bits are in one block.
      const bool apart =
          elsewhere && m < step_.num_states() && now.scalar_type() != at::kByte;
      tensors.states.push_back(apart ? now : moment.ToChange(slice, data));
      if (m >= step_.num_states()) continue;
      tensors.new_states.push_back(apart ? moment.Next(slice) : at::Tensor());
    }
    tensors.past_caches = true;
    tensors.gradient = gradient_.Now(slice, data);
    if (options_.early && !gradient_.streamed() && !step_.keeps_gradient()) {
      tensors.gradient = tensors.gradient.clone();
    }
    at::Tensor working;
    if (has_working_) {
      const bool holds_values = working_.buffer->in_memory();
      const bool copied = holds_values && !elsewhere;
      working = copied || !working_.next.elements.defined()
                    ? working_.ToChange(slice, data)
                    : working_.next.Part(slice);
      const bool in_kernel =
          holds_values || (step_.steps_all() && !working_.streamed());
      if (in_kernel) tensors.working = working;
    }
    UnitStep::Counts counts;
    const bool written = step_.Apply(slice, tensors, &counts);
    if (working.defined() && !(tensors.working.defined() && written)) {
      working.copy_(tensors.new_masters.defined() ? tensors.new_masters
                                                  : tensors.masters);
    }
  }

  FlatParameter& flat_;
  ShardStates& states_;
  UnitStep step_;
  const SliceStepOptions options_;
  const StreamPoint after_;
  bool skip_ = false;
  bool taken_ = false;  // the early step's values
  bool has_working_ = false;
  int64_t sent_ = 0;  // elements of the working copy that the device has got
  std::vector<Place> moments_;
  Place masters_, working_, gradient_;
  std::vector<StreamedUpdate::State> streamed_;
};

}  // namespace

absl::StatusOr<bool> StepHere(FlatParameter* flat, const UnitStep& step,
                              const at::Tensor& gradient,
                              UnitStep::Counts* counts, bool* changed) {
  const TraceScope trace(TraceTrack::kStep, "update", flat->name());
  ShardStates& states = flat->states();
  const bool directs = step.phase() == StepPhase::kDirection;
  const bool joins = states.splits() && !step.takes_remainders();
  TESSERA_ASSIGN_OR_RETURN(RaisedValue masters, states.RaiseValue(joins));
  TESSERA_ASSIGN_OR_RETURN(
      Raised working,
      Raised::Of(directs || joins ? nullptr : states.separate_working()));
  // A descent reads the average alone, a direction all but that.
  std::vector<TieredBuffer>& moments = states.moments();
  const size_t begin =
      step.phase() == StepPhase::kDescent ? step.num_states() : 0;
  const size_t end = directs ? step.num_states() : moments.size();
  StepTensors tensors;
  std::vector<Raised> raised;
  for (size_t s = begin; s < end; ++s) {
    TESSERA_ASSIGN_OR_RETURN(Raised moment, Raised::Of(&moments[s]));
    tensors.states.push_back(moment.View());
    raised.push_back(std::move(moment));
  }
  tensors.masters = masters.View();
  tensors.gradient = gradient;
  if (directs) {
    tensors.new_masters = gradient;
  } else {
    tensors.working = working.View();
  }
  *changed = true;  // and not only when all of it is back where it lies
  const bool working_written =
      step.Apply({0, flat->owned().numel()}, tensors, counts);
  for (Raised& moment : raised) TESSERA_RETURN_IF_ERROR(moment.Commit());
  if (directs) return false;
  TESSERA_RETURN_IF_ERROR(masters.Commit());
  if (working_written) TESSERA_RETURN_IF_ERROR(working.Commit());
  return working_written || joins || states.separate_working() == nullptr;
}

HostFactor::HostFactor(const GradientFactor& factor)
    : value_{factor.value, false} {
  if (!factor.scalars.defined()) return;
  const at::Tensor& scalars = factor.scalars;
  scalars_ = at::empty(scalars.sizes(),
                       scalars.options().device(at::kCPU).pinned_memory(true));
  scalars_.copy_(scalars, /*non_blocking=*/true);
  arrived_ = StreamPoint::Now(scalars.device());
}

HostFactor::Value HostFactor::Wait() const {
  if (!scalars_.defined()) return value_;
  arrived_.Wait();
  const double* const scalars = scalars_.const_data_ptr<double>();
  return {scalars[kFactor], scalars[kSkip] != 0};
}

StreamedUpdate StepSlices(FlatParameter* flat, const UnitStep& step,
                          SliceStepOptions options) {
  const bool to_device = options.on_device.defined();
  const auto slices =
      std::make_shared<SliceStep>(flat, step, std::move(options));
  StreamedUpdate update;
  update.numel = flat->owned().numel();
  update.unit = flat->name();
  update.states = slices->Streamed();
  update.compute = [slices](Range slice, const std::vector<char*>& data) {
    return slices->Compute(slice, data);
  };
  if (to_device) update.end = [slices] { return slices->End(); };
  return update;
}

}  // namespace tessera
