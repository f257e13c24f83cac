// StreamedStep: the step of a unit some of whose states lie on a disk, as the
// update stream wants it: what lies there comes slice by slice, the rest stays
// where it is.
#ifndef OPTIM_STREAMED_STEP_H_
#define OPTIM_STREAMED_STEP_H_

#include <array>
#include <memory>

#include "ATen/core/Tensor.h"
#include "base/layout/flat_buffer.h"
#include "offload/tiered_buffer.h"
#include "offload/update_stream.h"
#include "optim/unit_step.h"

namespace tessera {

class StreamedStep {
 public:
  // The optimizer's states are kStates and those after it.
  enum Place : int { kMasters, kWorking, kGradient, kStates };
  static Place StatePlace(size_t state) {
    return static_cast<Place>(kStates + static_cast<int>(state));
  }

  // `early`: for UpdateStream::PushEarly, so gradients are left as they are,
  // and what is changed in memory goes elsewhere (SetNext).
  explicit StreamedStep(const UnitStep& step, bool early = false);
  // What of the unit lies where, [owned] each; kWorking only where masters are
  // another. What SetMemory is given has elements one by one. In memory it must
  // outlive the step, but SetGradient's, which is freed when that is made.
  void Add(Place place, TieredBuffer* buffer);
  void SetGradient(FlatBuffer gradient);
  void SetMemory(Place place, at::Tensor elements);
  // Of memory in that place all elements as they are after the step.
  void SetNext(Place place, std::shared_ptr<const FlatBuffer> elements);
  // REQUIRES: some of it is on a disk.
  StreamedUpdate Update() &&;

 private:
  static constexpr int kNumPlaces =
      kStates + kMaxCustomStates + 1;  // the average
  void CountState(Place place);
  // What the update computes with: copied into it.
  struct Parts {
    UnitStep step;
    bool early;
    std::shared_ptr<const FlatBuffer> gradient;  // where it is in memory
    int states = 0;
    std::array<at::Tensor, kNumPlaces> memory;
    std::array<std::shared_ptr<const FlatBuffer>, kNumPlaces> next;
    std::array<int, kNumPlaces> streamed;  // number in the slice, or -1
    std::array<ElementFormat, kNumPlaces> formats;

    absl::Status Apply(Range slice, const std::vector<char*>& data) const;
  };
  Parts parts_;
  StreamedUpdate update_;
};

}  // namespace tessera
#endif  // OPTIM_STREAMED_STEP_H_
