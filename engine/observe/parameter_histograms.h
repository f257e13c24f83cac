// ParameterHistograms: histograms of whole parameters and of their gradients,
// made of what each rank has of them (the configuration's section histograms).
//
//   range of each shard -> all ranks -> the same buckets on all ranks
//   counts of each shard -> their sum over ranks
//
// Each element counts once, so the counts are those of the whole parameter at
// every stage and world size. Two passes over this rank's shards, a piece at a
// time; two small exchanges in all: 48 bytes, then up to 512, for each
// histogram.
#ifndef ENGINE_OBSERVE_PARAMETER_HISTOGRAMS_H_
#define ENGINE_OBSERVE_PARAMETER_HISTOGRAMS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "engine/model/sharded_model.h"
#include "monitor/step_metrics.h"
#include "sharding/gradient/gradients.h"

namespace tessera {

namespace proto {
class Histograms;
}

class ParameterHistograms {
 public:
  // Both outlive it. REQUIRES: section.every_steps() > 0. Returns
  // InvalidArgument, identical on all ranks, for a name in the section that is
  // no parameter's. LOCAL.
  static absl::StatusOr<ParameterHistograms> Create(
      const ShardedModel* model, const proto::Histograms& section);

  // Whether histograms are to be made in optimizer step `step`.
  bool IsDue(int64_t step) const { return step % every_steps_ == 0; }
  // Makes them, of parameters that have a gradient in this step: masters, and
  // gradients divided by `divisor`. Tags are "weights/NAME" and
  // "gradients/NAME". Complex numbers count as pairs of real ones. COLLECTIVE,
  // blocking; waits for a device. Errors are identical on all ranks: those of
  // a disk where shards are, ResourceExhausted, and Communicator's. REQUIRES:
  // Gradients::Enter, FlatParameter::PrepareUpdate of all.
  absl::StatusOr<std::vector<StepMetrics::Values>> Make(
      const Gradients& gradients, double divisor) const;

 private:
  ParameterHistograms() = default;

  const ShardedModel* model_ = nullptr;
  const proto::Histograms* section_ = nullptr;
  int64_t every_steps_ = 1;
  // By the parameter's number in the model: whether the section wants it.
  std::vector<bool> wanted_;
};

}  // namespace tessera
#endif  // ENGINE_OBSERVE_PARAMETER_HISTOGRAMS_H_
