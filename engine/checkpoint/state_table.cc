#include "engine/checkpoint/state_table.h"

#include <torch/torch.h>

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "checkpoint/checkpoint.h"
#include "optim/kernels/block8.h"
#include "optim/kernels/shaped_states.h"
#include "parallel/tensor/placed.h"

namespace tessera {
namespace {

using Parameter = FlatParameter::Parameter;

void AddTensor(const std::string& name, const at::Tensor& tensor,
               at::IntArrayRef sizes, int64_t offset, at::IntArrayRef strides,
               proto::CheckpointStorage* storage) {
  proto::CheckpointTensor* const added = storage->add_tensors();
  added->set_name(name);
  added->set_offset(offset);
  for (int64_t size : sizes) added->add_sizes(size);
  for (int64_t stride : strides) added->add_strides(stride);
  if (tensor.is_complex()) added->set_complex(true);
}

void AddState(const std::string& name, at::ScalarType dtype,
              proto::CheckpointStorage* storage) {
  proto::CheckpointState* const state = storage->add_states();
  state->set_name(name);
  state->set_dtype(CheckpointDtype(dtype));
}

std::set<std::string> PlainNames(absl::string_view names) {
  std::set<std::string> plain;
  for (absl::string_view name : absl::StrSplit(names, '+')) {
    for (absl::string_view option : {"_momentum", "_centered", "_amsgrad"}) {
      (void)absl::ConsumeSuffix(&name, option);
    }
    plain.emplace(name);
  }
  return plain;
}

}  // namespace

int64_t NumbersPer(const at::Tensor& tensor) {
  return tensor.is_complex() ? 2 : 1;
}

at::ScalarType NumberDtype(const at::Tensor& tensor) {
  return tensor.is_complex() ? c10::toRealValueType(tensor.scalar_type())
                             : tensor.scalar_type();
}

at::Tensor StateNumbers(const at::Tensor& kept, int64_t numel,
                        bool non_negative) {
  if (kept.scalar_type() != at::kByte) return kept.narrow(0, 0, numel);
  const at::Tensor blocks = kept.cpu();
  const at::Tensor numbers = at::empty({numel}, at::kFloat);
  DecodeBlock8(blocks.const_data_ptr(), numel, non_negative,
               numbers.mutable_data_ptr<float>());
  return numbers.to(kept.device());
}

void SetStateNumbers(const at::Tensor& numbers, bool non_negative,
                     const at::Tensor& kept) {
  if (kept.scalar_type() != at::kByte) {
    kept.copy_(numbers);
    return;
  }
  const at::Tensor floats = numbers.to(at::kCPU, at::kFloat).contiguous();
  const at::Tensor blocks =
      kept.is_cpu() ? kept : at::empty(kept.sizes(), at::kByte);
  EncodeBlock8(floats.const_data_ptr<float>(), floats.numel(), non_negative,
               blocks.mutable_data_ptr());
  if (!kept.is_cpu()) kept.copy_(blocks);
}

std::vector<int64_t> ContiguousStrides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(sizes[d], 1);
  }
  return strides;
}

std::vector<int64_t> PlainStrides(at::IntArrayRef sizes,
                                  at::IntArrayRef strides) {
  std::vector<int64_t> plain(strides.begin(), strides.end());
  bool empty = false;
  for (int64_t size : sizes) empty |= size == 0;
  for (size_t d = 0; d < plain.size(); ++d) {
    if (empty || sizes[d] == 1) plain[d] = 0;
  }
  return plain;
}

std::vector<int64_t> SavedSizes(const FlatParameter::Parameter& p) {
  return p.part.has_value() ? p.part->sizes : p.tensor.sizes().vec();
}

std::vector<int64_t> SavedStrides(const FlatParameter::Parameter& p) {
  if (!p.part.has_value()) return p.tensor.strides().vec();
  return p.part->of_pipeline() ? p.part->strides
                               : ContiguousStrides(p.part->sizes);
}

int64_t StateTable::WholeNumel(const Slot& slot) const {
  const FlatParameter& flat = FlatOf(slot.flat);
  const Parameter& p = flat.ParameterOfSlot(slot.slot);
  const std::optional<PartOfWhole>& part = p.part;
  if (part.has_value() && part->of_pipeline()) {
    return part->WholeNumel() * NumbersPer(p.tensor);
  }
  return flat.layout().slot(slot.slot).numel() *
         (part.has_value() ? part->parts : 1);
}

int StateTable::num_states(int flat) const {
  if (optimizer_ == nullptr) return kFirst;
  return kFirst +
         static_cast<int>(
             optimizer_->states().Names(static_cast<size_t>(flat)).size());
}

std::string StateTable::NameOf(int flat, State state) const {
  if (state == kValue) return "value";
  return optimizer_->states().Names(
      static_cast<size_t>(flat))[static_cast<size_t>(state - kFirst)];
}

bool StateTable::IsAverage(int flat, State state) const {
  return NameOf(flat, state) == "ema";
}

bool StateTable::MayBeginLate(int flat, State state) const {
  const std::string name = NameOf(flat, state);
  return IsAverage(flat, state) || name == "max_exp_avg_sq" ||
         name == "grad_avg" || name == "momentum_buffer";
}

bool StateTable::AreRelated(absl::string_view a, absl::string_view b) {
  return PlainNames(a) == PlainNames(b);
}

StateTable::StateTable(const std::vector<std::shared_ptr<FlatParameter>>& flats,
                       ShardedOptimizer* optimizer,
                       const torch::nn::Module& module)
    : flats_(flats), optimizer_(optimizer) {
  const auto named = module.named_parameters();
  const auto buffers = module.named_buffers();
  for (const auto& list : {named, buffers}) {
    for (const auto& item : list) {
      names_[PartOrSelf(item.value()).unsafeGetTensorImpl()].push_back(
          item.key());
    }
  }
  absl::flat_hash_set<const at::TensorImpl*> seen;
  std::vector<std::tuple<int, int, int>> places;  // index, flat, slot
  for (size_t f = 0; f < flats_.size(); ++f) {
    for (const Parameter& p : flats_[f]->parameters()) {
      const at::TensorImpl* const own = p.of_module().unsafeGetTensorImpl();
      seen.insert(own);
      if (own != p.tensor.unsafeGetTensorImpl()) {
        std::vector<std::string> names = names_[own];  // a map moves its values
        names_[p.tensor.unsafeGetTensorImpl()] = std::move(names);
      }
      // A parameter that the module has let go of since has this name only.
      std::vector<std::string>& names = names_[p.tensor.unsafeGetTensorImpl()];
      if (names.empty()) names.push_back(p.name);
    }
    for (int s = 0; s < flats_[f]->layout().num_slots(); ++s) {
      places.emplace_back(flats_[f]->ParameterOfSlot(s).index,
                          static_cast<int>(f), s);
    }
  }
  std::sort(places.begin(), places.end());
  for (const auto& [index, flat, slot] : places) slots_.push_back({flat, slot});
  for (const auto& item : named) {
    const at::Tensor& tensor = PartOrSelf(item.value());
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
      plain_.push_back({tensor, /*buffer=*/false});
    }
  }
  for (const auto& item : buffers) {
    if (item.value().defined() &&
        seen.insert(item.value().unsafeGetTensorImpl()).second) {
      plain_.push_back({item.value(), /*buffer=*/true});
    }
  }
  if (optimizer_ != nullptr) AddShaped();
}

void StateTable::AddShaped() {
  for (size_t f = 0; f < flats_.size(); ++f) {
    const Formula formula = optimizer_->states().FormulaOf(f);
    for (size_t i = 0; i < flats_[f]->parameters().size(); ++i) {
      const auto sizes = flats_[f]->parameters()[i].tensor.sizes();
      for (const StateShape& shape : ShapedStatesOf(formula, sizes)) {
        shaped_.push_back({static_cast<int>(f), i, shape.name, shape.sizes});
      }
    }
  }
  const auto index = [this](const Shaped& s) {
    return FlatOf(s.flat).parameters()[s.parameter].index;
  };
  std::stable_sort(
      shaped_.begin(), shaped_.end(),
      [&](const Shaped& a, const Shaped& b) { return index(a) < index(b); });
}

const std::vector<std::string>& StateTable::NamesOf(
    const at::Tensor& tensor) const {
  return names_.at(tensor.unsafeGetTensorImpl());
}

bool StateTable::Has(int flat, State state) const {
  return state == kValue ||
         (optimizer_ != nullptr && !FlatOf(flat).states().moments().empty());
}

at::ScalarType StateTable::DtypeOf(int flat, State state) const {
  if (IsSplit(flat, state)) return FlatOf(flat).states().value_dtype();
  const ElementFormat& format = Buffer(flat, state).format();
  return format.in_blocks() ? at::kFloat : format.dtype;
}

at::Tensor StateTable::Elements(int flat, State state, Range part) const {
  if (state == kValue) FlatOf(flat).states().Order();
  return Buffer(flat, state).View(part);
}

Range StateTable::Part(const Slot& slot, Range part) const {
  return Intersect(
      flats_[static_cast<size_t>(slot.flat)]->layout().slot(slot.slot), part);
}

void StateTable::DescribeSlot(const Slot& slot,
                              proto::CheckpointStorage* storage) const {
  const FlatParameter& flat = *flats_[static_cast<size_t>(slot.flat)];
  const Range range = flat.layout().slot(slot.slot);
  storage->set_numel(WholeNumel(slot));
  for (const Parameter& p : flat.parameters()) {
    if (p.slot != slot.slot) continue;
    const std::vector<int64_t> sizes = SavedSizes(p), strides = SavedStrides(p);
    for (const std::string& name : NamesOf(p.tensor)) {
      AddTensor(name, p.tensor, sizes,
                (p.range.begin - range.begin) / NumbersPer(p.tensor), strides,
                storage);
      if (optimizer_ != nullptr) {
        storage->mutable_tensors(storage->tensors_size() - 1)
            ->set_steps(
                optimizer_->counts().steps()[static_cast<size_t>(p.index)]);
      }
    }
  }
  for (State state = kValue; state < num_states(slot.flat); ++state) {
    if (Has(slot.flat, state)) {
      AddState(NameOf(slot.flat, state), DtypeOf(slot.flat, state), storage);
    }
  }
}

void StateTable::DescribeShaped(const Shaped& shaped,
                                proto::CheckpointManifest* head) const {
  const at::Tensor values = ValuesOf(shaped);
  if (!values.defined()) return;
  proto::CheckpointStorage* const storage = head->add_storages();
  storage->set_numel(values.numel());
  storage->set_shaped_state(true);
  for (const std::string& name : NamesOf(ParameterOf(shaped))) {
    AddTensor(absl::StrCat(name, "/", shaped.name), values, values.sizes(), 0,
              ContiguousStrides(values.sizes()), storage);
  }
  AddState(shaped.name, values.scalar_type(), storage);
}

void StateTable::Describe(proto::CheckpointManifest* head) const {
  for (const Slot& slot : slots_) DescribeSlot(slot, head->add_storages());
  for (const Plain& plain : plain_) {
    proto::CheckpointStorage* const storage = head->add_storages();
    storage->set_numel(plain.tensor.numel() * NumbersPer(plain.tensor));
    storage->set_buffer(plain.buffer);
    for (const std::string& name : NamesOf(plain.tensor)) {
      AddTensor(name, plain.tensor, plain.tensor.sizes(), 0,
                ContiguousStrides(plain.tensor.sizes()), storage);
    }
    AddState("value", NumberDtype(plain.tensor), storage);
  }
  for (const Shaped& shaped : shaped_) DescribeShaped(shaped, head);
}

}  // namespace tessera
