#include "sharding/lendable_flat.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/status.h"
#include "sharding/tensor_memory.h"

namespace tessera {
namespace {

int64_t BytesOf(const Unit& unit, const Unit::Parameter& parameter,
                int64_t least_bytes) {
  const at::Tensor& tensor = parameter.tensor;
  const auto bytes = static_cast<int64_t>(tensor.nbytes());
  if (least_bytes == 0 || bytes < least_bytes) return 0;
  const auto in_storage = std::count_if(
      unit.parameters().begin(), unit.parameters().end(),
      [&](const auto& other) { return other.slot == parameter.slot; });
  const bool lendable = unit.device().is_cpu() && in_storage == 1 &&
                        tensor.storage_offset() == 0 &&
                        tensor.is_non_overlapping_and_dense();
  return lendable ? bytes : 0;
}

class Loan final : public TensorMemory {
 public:
  explicit Loan(std::shared_ptr<FlatBuffer> flat) : flat_(std::move(flat)) {}

 private:
  std::shared_ptr<FlatBuffer> flat_;
};

}  // namespace

bool HasOneOwner(const at::Tensor& tensor) {
  return tensor.use_count() == 1 && tensor.storage().use_count() == 1;
}

LendableFlat::LendableFlat(const Unit& unit, int64_t least_bytes)
    : unit_(&unit) {
  for (const auto& p : unit.parameters()) {
    lendable_.push_back(BytesOf(unit, p, least_bytes));
  }
}

void LendableFlat::Hold(FlatBuffer flat) {
  flat_ = std::make_shared<FlatBuffer>(std::move(flat));
}

void LendableFlat::Reset() { flat_ = nullptr; }

FlatBuffer LendableFlat::Take() {
  TESSERA_CHECK(has_one_owner());
  FlatBuffer taken = std::move(*flat_);
  Reset();
  return taken;
}

char* LendableFlat::PlaceOf(int parameter) const {
  return flat_->data(unit_->parameters()[Index(parameter)].flat.begin);
}

bool LendableFlat::IsLent(int parameter) const {
  return lendable_[Index(parameter)] > 0 &&
         TensorMemoryAt(PlaceOf(parameter)) != nullptr;
}

c10::DataPtr LendableFlat::Lend(int parameter) {
  if (lendable_[Index(parameter)] == 0 || moved_ || IsLent(parameter)) {
    return {};
  }
  return DataPtrOf(PlaceOf(parameter), std::make_unique<Loan>(flat_));
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
      FlatBuffer::Allocate(flat_->numel(), flat_->dtype(), unit_->device(),
                           MemoryKind::kGradients, Fill::kNone));
  CopyBytes(unit_->device(), moved.data(), flat_->data(), flat_->bytes());
  Hold(std::move(moved));
  moved_ = true;
  return absl::OkStatus();
}

}  // namespace tessera
