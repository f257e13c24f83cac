#include "sharding/copy/flat_description.h"

#include <utility>

#include "absl/container/flat_hash_map.h"
#include "base/check.h"
#include "base/layout/flat_buffer.h"
#include "base/step_memory/step_memory.h"
#include "c10/core/StorageImpl.h"
#include "offload/remainders.h"
#include "offload/update_stream.h"

namespace tessera {
namespace {

// Storages of `params` in order of first appearance.
std::vector<const c10::StorageImpl*> DistinctStorages(
    const std::vector<NamedParameter>& params, std::vector<int>* slot_of) {
  std::vector<const c10::StorageImpl*> storages;
  absl::flat_hash_map<const c10::StorageImpl*, int> slots;
  for (const auto& p : params) {
    const c10::StorageImpl* const impl =
        p.tensor.storage().unsafeGetStorageImpl();
    const auto [it, first] =
        slots.try_emplace(impl, static_cast<int>(storages.size()));
    slot_of->push_back(it->second);
    if (first) storages.push_back(impl);
  }
  return storages;
}

}  // namespace

TieredBuffer::Place FlatParameterOptions::PlaceOf(Tier tier) const {
  return {tier, tier == Tier::kDisk ? stream->disk() : nullptr};
}

FlatLayout LayoutOf(const std::vector<NamedParameter>& parameters,
                    int world_size) {
  std::vector<int> slot_of;
  const auto storages = DistinctStorages(parameters, &slot_of);
  std::vector<int64_t> numel(storages.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto slot = static_cast<size_t>(slot_of[i]);
    const auto item =
        c10::elementSize(ElementType(parameters[i].tensor.scalar_type()));
    numel[slot] = static_cast<int64_t>(storages[slot]->nbytes() / item);
  }
  return FlatLayout(numel, world_size);
}

at::ScalarType WorkingDtypeOf(const std::vector<NamedParameter>& parameters,
                              const FlatParameterOptions& options) {
  return options.dtype.value_or(
      ElementType(parameters[0].tensor.scalar_type()));
}

at::ScalarType MasterDtypeOf(at::ScalarType parameters,
                             const FlatParameterOptions& options) {
  const at::ScalarType working = options.dtype.value_or(parameters);
  return options.narrow_masters && at::isReducedFloatingType(working)
             ? working
             : StepDtypeOf(parameters);
}

bool SplitsMasters(at::ScalarType parameters,
                   const FlatParameterOptions& options) {
  return options.remainder_masters &&
         options.dtype.value_or(parameters) == at::kBFloat16 &&
         MasterDtypeOf(parameters, options) == at::kFloat;
}

at::ScalarType KeptMasterDtypeOf(at::ScalarType parameters,
                                 const FlatParameterOptions& options) {
  return SplitsMasters(parameters, options)
             ? kRemainderDtype
             : MasterDtypeOf(parameters, options);
}

at::ScalarType StepDtypeOf(at::ScalarType masters) {
  return at::isReducedFloatingType(masters) ? at::kFloat : masters;
}

at::ScalarType GradientDtypeOf(at::ScalarType masters,
                               const FlatParameterOptions& options) {
  const at::ScalarType step = StepDtypeOf(masters);
  return step == at::kFloat ? options.gradient_dtype.value_or(step) : step;
}

at::ScalarType KeptGradientDtypeOf(at::ScalarType masters, at::ScalarType sums,
                                   const FlatParameterOptions& options) {
  const at::ScalarType gradient = GradientDtypeOf(masters, options);
  const bool narrow = options.narrow_gradients && gradient == at::kFloat &&
                      at::isReducedFloatingType(sums) &&
                      options.states_tier != Tier::kDisk &&
                      options.gradients_tier != Tier::kDisk;
  return narrow ? sums : gradient;
}

FlatDescription::FlatDescription(std::string name,
                                 std::vector<NamedParameter> params,
                                 const FlatParameterOptions& options,
                                 std::shared_ptr<Communicator> comm)
    : options_(options), name_(std::move(name)), comm_(std::move(comm)) {
  TESSERA_CHECK(!params.empty()) << "flat parameter " << name_;
  const at::ScalarType original = ElementType(params[0].tensor.scalar_type());
  dtype_ = WorkingDtypeOf(params, options_);
  master_dtype_ = MasterDtypeOf(original, options_);
  kept_master_dtype_ = KeptMasterDtypeOf(original, options_);
  reduce_dtype_ = options_.reduce_dtype.value_or(dtype_);
  gradient_dtype_ = GradientDtypeOf(master_dtype_, options_);
  kept_gradient_dtype_ =
      KeptGradientDtypeOf(master_dtype_, reduce_dtype_, options_);
  device_ = params[0].tensor.device();
  layout_ = LayoutOf(params, comm_->world_size());
  owned_ = options_.stage.sharded_optimizer ? layout_.shard(comm_->rank())
                                            : Range{0, layout_.whole_numel()};
  std::vector<int> slot_of;
  DistinctStorages(params, &slot_of);
  for (size_t i = 0; i < params.size(); ++i) {
    Parameter p;
    p.tensor = params[i].tensor;
    p.name = std::move(params[i].name);
    p.index = params[i].index;
    p.slot = slot_of[i];
    p.part = std::move(params[i].part);
    p.counted_elsewhere = params[i].counted_elsewhere;
    const int64_t per = ElementsPerNumber(p.tensor.scalar_type());
    p.storage_offset = p.tensor.storage_offset() * per;
    p.range.begin = layout_.slot(p.slot).begin + p.storage_offset;
    p.range.end = p.range.begin + p.tensor.numel() * per;
    const Range mine = Intersect(p.range, owned_);
    if (!mine.empty()) segments_.push_back({static_cast<int>(i), mine});
    if (static_cast<size_t>(p.slot) == first_of_slot_.size()) {
      first_of_slot_.push_back(i);
      const std::string& unit = params[i].unit.empty() ? name_ : params[i].unit;
      memory_units_.push_back(StepMemory::Global().UnitNumber(unit));
    }
    params_.push_back(std::move(p));
  }
}

}  // namespace tessera
