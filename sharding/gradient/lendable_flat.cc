#include "sharding/gradient/lendable_flat.h"

#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "base/torch/tensor_memory.h"

namespace tessera {
namespace {

// `alone`: no other parameter lies in its storage.
int64_t BytesOf(const FlatParameter& flat,
                const FlatParameter::Parameter& parameter, bool alone,
                int64_t least_bytes) {
  const at::Tensor& tensor = parameter.tensor;
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (least_bytes == 0 || bytes < least_bytes) return 0;
  const bool lendable = flat.device().is_cpu() && alone &&
                        tensor.storage_offset() == 0 &&
                        tensor.is_non_overlapping_and_dense();
  return lendable ? bytes : 0;
}

class Loan final : public TensorMemory {
 public:
  explicit Loan(std::shared_ptr<FlatBuffer> buffer)
      : buffer_(std::move(buffer)) {}

 private:
  std::shared_ptr<FlatBuffer> buffer_;
};

}  // namespace

bool HasOneOwner(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

LendableFlat::LendableFlat(const FlatParameter& flat, int64_t least_bytes)
    : flat_(&flat) {
  std::vector<int> in_storage(flat.storages().size());
  for (const auto& p : flat.parameters()) ++in_storage[Index(p.slot)];
  for (const auto& p : flat.parameters()) {
    lendable_.push_back(
        BytesOf(flat, p, in_storage[Index(p.slot)] == 1, least_bytes));
  }
}

void LendableFlat::Hold(FlatBuffer buffer) {
  buffer_ = std::make_shared<FlatBuffer>(std::move(buffer));
}

void LendableFlat::Reset() { buffer_ = nullptr; }

FlatBuffer LendableFlat::Take() {
  TESSERA_CHECK(has_one_owner());
  FlatBuffer taken = std::move(*buffer_);
  Reset();
  return taken;
}

char* LendableFlat::PlaceOf(int parameter) const {
  return buffer_->data(flat_->parameters()[Index(parameter)].range.begin);
}

bool LendableFlat::IsLent(int parameter) const {
  return lendable_[Index(parameter)] > 0 &&
         TensorMemoryAt(PlaceOf(parameter)) != nullptr;
}

c10::DataPtr LendableFlat::Lend(int parameter) {
  if (lendable_[Index(parameter)] == 0 || moved_ || IsLent(parameter)) {
    return {};
  }
  return DataPtrOf(PlaceOf(parameter), std::make_unique<Loan>(buffer_));
}

bool LendableFlat::LiesInPlace(int parameter, const at::Tensor& tensor) const {
  return tensor.const_data_ptr() == PlaceOf(parameter) && IsLent(parameter) &&
         HasOneOwner(tensor);
}

absl::Status LendableFlat::Vacate(int parameter) {
  return IsLent(parameter) ? MoveAway() : absl::OkStatus();
}

absl::Status LendableFlat::VacateAll() {
  for (size_t i = 0; i < lendable_.size(); ++i) {
    TESSERA_RETURN_IF_ERROR(Vacate(static_cast<int>(i)));
  }
  return absl::OkStatus();
}

absl::Status LendableFlat::MoveAway() {
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer moved,
      FlatBuffer::Allocate(buffer_->numel(), buffer_->dtype(), flat_->device(),
                           MemoryKind::kGradients, Fill::kNone));
  CopyBytes(flat_->device(), moved.data(), buffer_->data(), buffer_->bytes());
  Hold(std::move(moved));
  moved_ = true;
  return absl::OkStatus();
}

}  // namespace tessera
