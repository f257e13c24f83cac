// DistributedOrder is the order of a DistributedSampler
// (data/distributed_sampler.h) in the form that a loader takes.
#ifndef DATA_DISTRIBUTED_ORDER_H_
#define DATA_DISTRIBUTED_ORDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "data/distributed_sampler.h"
#include "data/sample_order.h"

namespace tessera {

class DistributedOrder : public SampleOrder {
 public:
  // Starts at epoch 0, position 0. Errors are those of
  // DistributedSampler::Create.
  static absl::StatusOr<std::unique_ptr<SampleOrder>> Create(
      const DistributedSamplerOptions& options);

  std::vector<Sample> NextBatch(int64_t count) override;
  int64_t epoch() const override { return sampler_.state().epoch; }
  int64_t LeftInEpoch() const override;
  absl::Status SetEpoch(int64_t epoch) override;

  // Returns "epoch=1 position=640 samples=1000 seed=7 shuffle=1". Rank and
  // world size are not in it, and drop_last may differ at Seek.
  std::string State() const override;
  absl::Status Seek(absl::string_view state) override;

 private:
  DistributedOrder(const DistributedSamplerOptions& options,
                   DistributedSampler sampler)
      : options_(options), sampler_(std::move(sampler)) {}
  std::string OfWhat() const;

  const DistributedSamplerOptions options_;
  DistributedSampler sampler_;
};

}  // namespace tessera
#endif  // DATA_DISTRIBUTED_ORDER_H_
