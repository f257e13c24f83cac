// Why what lies on a disk is read twice. Memory may hold neither all of it nor
// its old values, so it can only be read over these, a part at a time. A
// damaged file that was found there would leave half of each; so that it is
// found while nothing has changed, all is verified first, as it is for what
// lies in memory, where both are held and each byte is read once. New extents
// for what is read would do, too, but need twice the room on the disk, which
// nobody has promised. What fails in the second reading (a disk, or a file that
// has been changed between) is an error after a change: LoadState tells so, and
// the engine trains on with none of it. The same is so of states of 8 bits in
// memory: as float32, which a checkpoint has them as, they are four times as
// large, and memory may not hold all of that.
#include "engine/checkpoint/state_reads.h"

#include <algorithm>
#include <utility>

#include "ATen/MemoryOverlap.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"
#include "base/torch_guard.h"
#include "engine/checkpoint/own_values.h"
#include "engine/checkpoint/part_runs.h"

namespace tessera {
namespace {

constexpr int64_t kAlignBytes = 64;

// Whether elements that the checkpoint has as `dtype` can be read to where they
// belong.
bool CanBeReadTo(const at::Tensor& elements, at::ScalarType dtype) {
  return elements.is_cpu() && elements.is_contiguous() &&
         elements.scalar_type() == dtype;
}

WantedElements ReadTo(const at::Tensor& elements, WantedElements from) {
  from.to = static_cast<char*>(elements.mutable_data_ptr());
  return from;
}

}  // namespace

size_t Staging::Add(const WantedElements& wanted, at::ScalarType dtype) {
  const int64_t bytes = (wanted.end - wanted.begin) *
                        static_cast<int64_t>(c10::elementSize(dtype));
  wanted_.push_back(wanted);
  dtypes_.push_back(dtype);
  begins_.push_back(bytes_);
  bytes_ += (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
  return wanted_.size() - 1;
}

absl::Status Staging::Allocate() {
  TESSERA_ASSIGN_OR_RETURN(
      memory_, CopyMemory::Allocate(bytes_, CopyMemory::Pages::kSmall));
  for (size_t i = 0; i < wanted_.size(); ++i) {
    wanted_[i].to = memory_.data() + begins_[i];
  }
  return absl::OkStatus();
}

at::Tensor Staging::Numbers(size_t i) const {
  const WantedElements& of = wanted_[i];
  return TensorOver(of.to, {of.end - of.begin}, {1}, dtypes_[i], at::kCPU);
}

absl::Status StateReads::CheckWritable(const StateMatch& match) const {
  for (const StateTable::Plain& plain : table_.plain()) {
    const at::Tensor& t = plain.tensor;
    if (!match.plain(static_cast<size_t>(&plain - table_.plain().data()))
             .loaded()) {
      continue;
    }
    if (!t.is_inference() && !t.is_conj() && !t.is_neg() &&
        at::has_internal_overlap(t) != at::MemOverlap::Yes) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "'", table_.NamesOf(t)[0],
        "' cannot be written in place (expanded, "
        "conjugated or negated without a copy, or of inference mode); "
        "register a clone of it"));
  }
  return absl::OkStatus();
}

absl::Status StateReads::Plan(const StateMatch& match, bool with_states) {
  for (size_t s = 0; s < table_.slots().size(); ++s) {
    PlanSlot(table_.slots()[s], match.slot(s), with_states);
  }
  for (size_t i = 0; i < table_.plain().size(); ++i) {
    PlanPlain(table_.plain()[i].tensor, match.plain(i));
  }
  if (with_states) PlanShaped(match);
  // Slots are in the module's order, and those of one flat not all together.
  std::stable_sort(
      read_again_.begin(), read_again_.end(),
      [](const Owned& a, const Owned& b) { return a.flat < b.flat; });
  return staging_.Allocate();
}

void StateReads::PlanSlot(const StateTable::Slot& slot,
                          const StateMatch::Place& place, bool with_states) {
  const FlatParameter& flat = *flats_[static_cast<size_t>(slot.flat)];
  const Range part = table_.Part(slot, flat.owned());
  if (part.empty() || !place.loaded()) return;
  const int64_t begin = flat.layout().slot(slot.slot).begin;
  const std::vector<PartRun> runs =
      RunsOf(table_.PartOf(slot), {part.begin - begin, part.end - begin},
             NumbersPer(flat.ParameterOfSlot(slot.slot).tensor));
  for (StateTable::State kind = 0; kind < table_.num_states(slot.flat);
       ++kind) {
    if (!table_.Has(slot.flat, kind)) continue;
    if (kind != StateTable::kValue && !with_states) continue;
    const int number = place.states[kind];
    // An average that begins late begins with the values.
    const int from =
        number < 0 && place.has_states() && table_.IsAverage(slot.flat, kind)
            ? place.states[StateTable::kValue]
            : number;
    for (const PartRun& run : runs) {
      Owned one;
      one.flat = slot.flat;
      one.kind = kind;
      const int64_t at = begin - flat.owned().begin + run.part;
      one.range = {at, at + run.numel};
      if (from >= 0) {
        const int64_t first = run.whole + place.shift;
        one.from = WantedElements{place.storage, from, first, first + run.numel,
                                  nullptr};
        one.dtype = DtypeOfCheckpoint(
            manifest_.storages(place.storage).states(from).dtype());
      }
      AddOwned(std::move(one));
    }
  }
}

// States that are zeros, as those of a new engine, are read to where they
// belong; what else is to be overwritten in memory is staged.
void StateReads::AddOwned(Owned one) {
  const TieredBuffer& buffer = table_.Buffer(one.flat, one.kind);
  if (!table_.IsSplit(one.flat, one.kind) &&
      (buffer.on_disk() || buffer.format().in_blocks())) {
    read_again_.push_back(std::move(one));
    return;
  }
  if (!buffer.elsewhere() && one.from.has_value() &&
      one.kind != StateTable::kValue &&
      optimizer_->states().has_zeros(static_cast<size_t>(one.flat))) {
    const at::Tensor elements = PlaceOf(one);
    if (CanBeReadTo(elements, one.dtype)) {
      in_place_.push_back(ReadTo(elements, *one.from));
      zeros_.push_back(elements);
      return;
    }
  }
  StagedOwned staged;
  if (one.from.has_value()) staged.number = staging_.Add(*one.from, one.dtype);
  staged.to = std::move(one);
  staged_.push_back(std::move(staged));
}

void StateReads::PlanPlain(const at::Tensor& tensor,
                           const StateMatch::Place& place) {
  if (!place.loaded()) return;
  StagedWhole staged;
  staged.to = tensor.detach();
  if (tensor.is_complex()) staged.to = at::view_as_real(staged.to);
  const proto::CheckpointStorage& storage = manifest_.storages(place.storage);
  staged.name = storage.tensors(0).name();
  const int number = place.states[StateTable::kValue];
  staged.number =
      staging_.Add({place.storage, number, place.shift,
                    place.shift + staged.to.numel(), nullptr},
                   DtypeOfCheckpoint(storage.states(number).dtype()));
  whole_.push_back(std::move(staged));
}

void StateReads::PlanShaped(const StateMatch& match) {
  for (size_t i = 0; i < table_.shaped().size(); ++i) {
    const StateTable::Shaped& shaped = table_.shaped()[i];
    StagedWhole staged;
    staged.to = table_.ValuesOf(shaped);
    if (!staged.to.defined() ||
        !match.steps(table_.ParameterOf(shaped)).has_value()) {
      continue;
    }
    const int storage = match.shaped(i);
    if (storage >= 0) {
      const proto::CheckpointStorage& of = manifest_.storages(storage);
      staged.number = staging_.Add({storage, 0, 0, of.numel(), nullptr},
                                   DtypeOfCheckpoint(of.states(0).dtype()));
    }
    whole_.push_back(std::move(staged));
  }
}

std::vector<WantedElements> StateReads::Wanted() const {
  std::vector<WantedElements> wanted = staging_.wanted();
  wanted.insert(wanted.end(), in_place_.begin(), in_place_.end());
  for (const Owned& one : read_again_) {
    if (one.from.has_value()) wanted.push_back(*one.from);
  }
  return wanted;
}

void StateReads::Undo() {
  for (const at::Tensor& zeros : zeros_) zeros.zero_();
}

absl::Status StateReads::TakeOwn(
    const std::map<std::string, std::string>& values) {
  for (const StagedWhole& one : whole_) {
    const auto it = values.find(absl::StrCat(kOwnTensor, one.name));
    if (one.name.empty() || it == values.end()) continue;
    const at::Tensor numbers = staging_.Numbers(*one.number);
    if (it->second.size() != numbers.nbytes()) {
      return absl::DataLossError(
          absl::StrCat("its own '", one.name, "' has ", it->second.size(),
                       " bytes, expected ", numbers.nbytes()));
    }
    std::copy(it->second.begin(), it->second.end(),
              static_cast<char*>(numbers.mutable_data_ptr()));
  }
  return absl::OkStatus();
}

at::Tensor StateReads::PlaceOf(const Owned& one) const {
  return table_.Elements(one.flat, one.kind, one.range);
}

absl::Status StateReads::Place() {
  for (const StagedWhole& one : whole_) {
    if (one.number.has_value()) {
      one.to.copy_(staging_.Numbers(*one.number).view(one.to.sizes()));
    } else {
      one.to.zero_();
    }
  }
  for (const StagedOwned& one : staged_) {
    TESSERA_RETURN_IF_ERROR(PlaceOwned(one));
  }
  staging_ = Staging();
  whole_.clear();
  staged_.clear();
  return absl::OkStatus();
}

void StateReads::Put(const StagedOwned& one, const at::Tensor& to) const {
  if (one.to.from.has_value()) {
    to.copy_(staging_.Numbers(one.number));
  } else {
    to.zero_();
  }
}

absl::Status StateReads::PlaceOwned(const StagedOwned& one) const {
  if (!table_.Has(one.to.flat, one.to.kind)) return absl::OkStatus();
  if (table_.IsSplit(one.to.flat, one.to.kind)) return PlaceSplit(one);
  TieredBuffer& buffer = table_.Buffer(one.to.flat, one.to.kind);
  if (buffer.on_host()) {
    TESSERA_ASSIGN_OR_RETURN(
        const at::Tensor all,
        CatchTorch(buffer.what(), [&] { return buffer.Host().Wait(); }));
    Put(one, all.slice(0, one.to.range.begin, one.to.range.end));
    return absl::OkStatus();
  }
  // They did not lie on a disk when they were staged. But where the states of a
  // flat were dropped its masters were, too, and the shard in their place may.
  TESSERA_ASSIGN_OR_RETURN(Raised raised, Raised::Of(&buffer));
  Put(one, PlaceOf(one.to));
  return raised.Commit();
}

absl::Status StateReads::PlaceSplit(const StagedOwned& one) const {
  ShardStates& states = flats_[static_cast<size_t>(one.to.flat)]->states();
  return CatchTorch("masters", [&] {
    return states.SplitFrom(one.to.range,
                            one.to.from.has_value()
                                ? staging_.Numbers(one.number)
                                : at::zeros({one.to.range.numel()}));
  });
}

absl::Status StateReads::ReadAgain(CheckpointReader* reader) {
  const absl::Span<const Owned> all(read_again_);
  for (size_t begin = 0; begin < all.size();) {
    size_t end = begin + 1;
    while (end < all.size() && all[end].flat == all[begin].flat) ++end;
    TESSERA_RETURN_IF_ERROR(ReadFlat(all.subspan(begin, end - begin), reader));
    begin = end;
  }
  return absl::OkStatus();
}

// In memory is one flat at a time: all its states, which lie in the checkpoint
// beside each other.
absl::Status StateReads::ReadFlat(absl::Span<const Owned> parts,
                                  CheckpointReader* reader) const {
  std::vector<Raised> raised;
  std::vector<WantedElements> wanted;
  Staging casts;
  struct Cast {
    at::Tensor to;
    bool non_negative;
    size_t number;
  };
  std::vector<Cast> to_cast;
  for (const Owned& one : parts) {
    if (!table_.Has(one.flat, one.kind)) continue;
    TESSERA_ASSIGN_OR_RETURN(Raised here,
                             Raised::Of(&table_.Buffer(one.flat, one.kind)));
    raised.push_back(std::move(here));
    const at::Tensor to = PlaceOf(one);
    if (!one.from.has_value()) {
      to.zero_();
    } else if (CanBeReadTo(to, one.dtype)) {
      wanted.push_back(ReadTo(to, *one.from));
    } else {
      to_cast.push_back({to, table_.non_negative(one.flat, one.kind),
                         casts.Add(*one.from, one.dtype)});
    }
  }
  TESSERA_RETURN_IF_ERROR(casts.Allocate());
  wanted.insert(wanted.end(), casts.wanted().begin(), casts.wanted().end());
  TESSERA_RETURN_IF_ERROR(ReadVerified(reader, wanted));
  for (const Cast& cast : to_cast) {
    SetStateNumbers(casts.Numbers(cast.number), cast.non_negative, cast.to);
  }
  for (Raised& one : raised) TESSERA_RETURN_IF_ERROR(one.Commit());
  return absl::OkStatus();
}

}  // namespace tessera
