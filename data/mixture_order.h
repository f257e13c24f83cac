// MixtureOrder gives each rank its places of a Mixture (data/mixture.h) in the
// form that a loader takes: rank r of W takes p + r, p + r + W, ..., where p is
// where all ranks began or were sent to.
//
// Sample::index is a place of the mixture, which Mixture::At takes. An epoch is
// the whole mixture. Where sources repeat there is only one epoch; where the
// first source that ends is the end, the next epoch is the same again. A rest
// of an epoch with less than one sample for each rank is left out.
#ifndef DATA_MIXTURE_ORDER_H_
#define DATA_MIXTURE_ORDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "data/mixture.h"
#include "data/sample_order.h"

namespace tessera {

class MixtureOrder : public SampleOrder {
 public:
  // `mixture` outlives this. Returns InvalidArgument for a rank outside 0..W-1,
  // or a mixture with fewer samples than ranks.
  static absl::StatusOr<std::unique_ptr<SampleOrder>> Create(
      const Mixture* mixture, int rank, int world_size);

  std::vector<Sample> NextBatch(int64_t count) override;
  int64_t epoch() const override { return epoch_; }
  int64_t LeftInEpoch() const override;
  absl::Status SetEpoch(int64_t epoch) override;

  // Returns "epoch=0 position=640 mixture=1f0c.."; rank and world size are not
  // in it.
  std::string State() const override;
  absl::Status Seek(absl::string_view state) override;

 private:
  MixtureOrder(const Mixture* mixture, int rank, int world_size)
      : mixture_(*mixture), rank_(rank), world_size_(world_size) {}
  std::string OfWhat() const;
  // Moves to the next epoch if this one has no whole round left.
  void Settle();

  const Mixture& mixture_;  // not owned
  const int rank_;
  const int world_size_;
  int64_t epoch_ = 0;
  int64_t position_ = 0;  // what all ranks have taken of the epoch
};

}  // namespace tessera
#endif  // DATA_MIXTURE_ORDER_H_
