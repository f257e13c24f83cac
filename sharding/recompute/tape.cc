// Why memories and not tensors are followed: views are made below the
// fallback's sight (sharding/dispatch/views.cc), by operators that cost nothing
// to see, and by libtorch's own code between operators. A tensor is a place in
// a memory, however it came about; a memory is made by exactly one operator.
//
// Why what nobody has filled is kept: an at::empty that a raw pointer wrote to
// would be other bytes in Replay. It is found where it is read, since what
// fills it is seen by nobody.
#include "sharding/recompute/tape.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/torch/placed_tensor.h"
#include "sharding/dispatch/stack_tensors.h"
#include "sharding/flat/registry.h"

namespace tessera {
namespace {

bool MakesUnfilled(const std::string& name) {
  return absl::StartsWith(name, "aten::empty");
}

// Where the operator may draw from: a generator among its arguments, or the
// default one of its device.
at::Generator GeneratorOf(const torch::jit::Stack& stack, size_t n) {
  std::optional<at::Device> device;
  for (size_t i = 0; i < n; ++i) {
    const c10::IValue& value = stack[stack.size() - n + i];
    if (value.isGenerator()) {
      const at::Generator& own = value.toGenerator();
      if (own.defined()) return own;
    } else if (value.isDevice()) {
      device = value.toDevice();
    }
  }
  ForEachTensorOf(stack, n, [&](const at::Tensor& t, size_t) {
    if (t.defined() && !device.has_value()) device = t.device();
  });
  return DefaultGeneratorOf(device.value_or(at::kCPU));
}

// Some result is a tensor that the schema does not call an alias.
bool MakesTensors(const c10::FunctionSchema& schema) {
  const auto& returns = schema.returns();
  return std::any_of(returns.begin(), returns.end(), [](const auto& result) {
    const bool is_tensor =
        result.type()->isSubtypeOf(*c10::TensorType::get()) ||
        result.type()->isSubtypeOf(*c10::ListType::ofTensors());
    return is_tensor && result.alias_info() == nullptr;
  });
}

// The argument that may be a generator; -1.
int GeneratorArgument(const c10::FunctionSchema& schema) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() == "generator") return static_cast<int>(i);
  }
  return -1;
}

// `tensor` is all of its memory.
bool IsWhole(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() &&
         tensor.nbytes() == tensor.storage().nbytes();
}

bool HoldsUnknown(const c10::IValue& value) {
  return value.isObject() || value.isCapsule() || value.isGenericDict() ||
         value.isTuple() || value.isStorage() || value.isFuture();
}

}  // namespace

int Tape::MemoryOf(const at::Tensor& tensor) const {
  const int* const memory = by_storage_.Find(StorageOf(tensor));
  return memory == nullptr ? -1 : *memory;
}

void Tape::Spoil(std::string why) {
  if (spoilt_.empty()) spoilt_ = std::move(why);
  Clear();
}

void Tape::SpoilBy(const OperatorInfo& info, const std::string& why) {
  Spoil(absl::StrCat("operator ", info.name, " ", why));
}

void Tape::Failed() {
  if (running_.has_value()) Spoil("an operator of it failed");
}

// False: nothing of it is to be recorded. Spoils the tape where it cannot be.
bool Tape::MayRecord(const c10::OperatorHandle& op, const OperatorInfo& info,
                     const torch::jit::Stack& stack) {
  const size_t n = info.writes.size();
  bool writes = false, writes_memory = false, writes_parameter = false;
  bool plain = true;
  ForEachTensorOf(stack, n, [&](const at::Tensor& t, size_t i) {
    if (!t.defined()) return;
    plain &= IsPlain(t) || !t.has_storage();
    if (!info.MayWrite(stack, i)) return;
    writes |= info.writes[i];
    writes_memory |= MemoryOf(t) >= 0;
    writes_parameter |= static_cast<bool>(Registry::Global().Find(t));
  });
  const bool makes = MakesTensors(op.schema());
  if (!writes && !makes) return false;
  if (info.writes_are_guessed()) {
    SpoilBy(info,
            "does not say which of its arguments it writes (define it "
            "with a schema: \"my::op(Tensor x) -> Tensor\")");
    return false;
  }
  if (writes_parameter) {
    SpoilBy(info, "writes a parameter");
    return false;
  }
  // A write to what lies outside: those who read it then read what it is after
  // that.
  if (!makes && !writes_memory) return false;
  for (size_t i = 0; i < n; ++i) {
    plain &= !HoldsUnknown(stack[stack.size() - n + i]);
  }
  if (!plain) SpoilBy(info, "has an argument that is no plain tensor");
  return plain;
}

Tape::Use Tape::UseOf(const at::Tensor& tensor, bool written, bool overwritten,
                      OutsideTensors* outside) {
  Use use;
  if (!tensor.defined()) return use;
  use.written = written;
  use.placed = IsPlain(tensor);
  if (use.placed) use.place = TensorPlace(tensor);
  use.memory = MemoryOf(tensor);
  if (use.memory < 0) {
    use.outside = outside->Of(tensor);
    use.storage = StorageOf(tensor);
    // It is to be read as it is before the operator.
    if (written) use.outside->Copy();
    return use;
  }
  Memory& memory = memories_[static_cast<size_t>(use.memory)];
  if (memory.unfilled && !overwritten) Fill(use.memory, tensor.storage());
  memory.unfilled = false;
  if (written) ++memory.writers;
  return use;
}

// Somebody else has filled it.
void Tape::Fill(int index, const c10::Storage& storage) {
  Operator fills;
  fills.fills = true;
  Use use;
  use.memory = index;
  use.outside = std::make_shared<OutsideTensor>(BytesOf(storage));
  use.outside->Copy();
  fills.uses.push_back(std::move(use));
  operators_.push_back(std::move(fills));
  ++memories_[static_cast<size_t>(index)].writers;
}

bool Tape::Begin(const c10::OperatorHandle& op, const OperatorInfo& info,
                 const torch::jit::Stack& stack, OutsideTensors* outside) {
  if (!spoilt_.empty() || !MayRecord(op, info, stack)) return false;
  const size_t n = info.writes.size();
  const auto& schema = op.schema().arguments();
  Operator made;
  made.handle = op;
  signature_ = signature_ * 31 + reinterpret_cast<uintptr_t>(&op.schema());
  ForEachTensorOf(stack, n, [&](const at::Tensor& t, size_t i) {
    const bool overwritten =
        (schema[i].is_out() || (i == 0 && info.overwrites && info.writes[i])) &&
        t.defined() && IsPlain(t) && IsWhole(t);
    made.uses.push_back(
        UseOf(t, info.MayWrite(stack, i), overwritten, outside));
  });
  for (size_t i = 0; i < n; ++i) {
    made.arguments.push_back(
        WithTensors(stack[stack.size() - n + i],
                    [](const at::Tensor&) { return at::Tensor(); }));
  }
  before_.reset();
  if (info.may_draw) {
    made.generator = GeneratorArgument(op.schema());
    const at::Generator generator = GeneratorOf(stack, n);
    if (generator.defined()) before_.emplace(generator);
  }
  running_ = std::move(made);
  return true;
}

void Tape::End(const c10::OperatorHandle& op, const OperatorInfo& info,
               const torch::jit::Stack& stack, bool keep) {
  if (!running_.has_value()) return;
  Operator made = *std::exchange(running_, std::nullopt);
  if (before_.has_value() && !before_->IsCurrent()) {
    made.drawn_from = std::exchange(before_, std::nullopt);
  }
  const size_t n = op.schema().returns().size();
  size_t position = 0;
  ForEachTensorOf(stack, n, [&](const at::Tensor& t, size_t i) {
    const size_t here = position++;
    const bool aliases = op.schema().returns()[i].alias_info() != nullptr;
    if (!t.defined() || !IsPlain(t) || aliases || MemoryOf(t) >= 0) return;
    // Some give views without saying so (unsafe_split).
    if (made.ReadsOutside(t)) return;
    const int index = static_cast<int>(memories_.size());
    Memory memory;
    memory.writers = 1;
    memory.maker = info.name;
    memory.unfilled = MakesUnfilled(info.name);
    if (keep) memory.held = AliasOf(t);
    memories_.push_back(std::move(memory));
    by_storage_.Add(t.storage(), index);
    made.results.push_back({here, index, TensorPlace(t)});
  });
  // What it did to what it was given is not known.
  const bool writes = std::any_of(made.uses.begin(), made.uses.end(),
                                  [](const Use& use) { return use.written; });
  if (!info.aten && made.results.empty() && !writes) {
    SpoilBy(info, "returns what it was given, and does not say so");
    return;
  }
  operators_.push_back(std::move(made));
}

bool Tape::Operator::ReadsOutside(const at::Tensor& tensor) const {
  const auto* const storage = StorageOf(tensor);
  return std::any_of(uses.begin(), uses.end(), [&](const Use& use) {
    return use.outside != nullptr && use.storage == storage;
  });
}

std::vector<int> Tape::MadeWith(int memory) const {
  std::vector<int> made;
  for (const Operator& op : operators_) {
    made.clear();
    for (const Result& result : op.results) made.push_back(result.memory);
    if (std::find(made.begin(), made.end(), memory) != made.end()) return made;
  }
  return {memory};
}

void Tape::Clear() {
  running_.reset();
  operators_.clear();
  memories_.clear();
  by_storage_.Clear();
  wanted_.clear();
  last_used_.clear();
}

// But what is filled from, which is read as it is.
void Tape::MoveHeld(ActivationStore::Group* group) {
  const std::string what = absl::StrCat("activations of ", name_);
  for (Memory& memory : memories_) {
    if (memory.outside != nullptr) memory.outside->MoveTo(group, what);
    memory.held.reset();
  }
  for (const Operator& op : operators_) {
    for (const Use& use : op.uses) {
      if (use.outside != nullptr && !op.fills) use.outside->MoveTo(group, what);
    }
  }
}

bool Tape::IsNeeded(const Operator& op, const std::vector<bool>& needed) const {
  for (const Use& use : op.uses) {
    const bool writes = use.written || op.fills;
    if (writes && use.memory >= 0 && needed[static_cast<size_t>(use.memory)]) {
      return true;
    }
  }
  return std::any_of(op.results.begin(), op.results.end(),
                     [&](const Result& result) {
                       return needed[static_cast<size_t>(result.memory)];
                     });
}

void Tape::Close(absl::Span<const int> wanted, OutsideTensors* outside) {
  wanted_.assign(wanted.begin(), wanted.end());
  // What was written again since is not what it was when it was made.
  for (Memory& memory : memories_) {
    if (memory.writers > 1) memory.held.reset();
  }
  std::vector<bool> needed(memories_.size(), false);
  std::vector<bool> held_needed(memories_.size(), false);
  const auto need = [&](int memory) {
    const auto m = static_cast<size_t>(memory);
    (memories_[m].held.defined() ? held_needed : needed)[m] = true;
  };
  for (const int memory : wanted_) need(memory);
  std::vector<Operator> kept;
  for (auto op = operators_.rbegin(); op != operators_.rend(); ++op) {
    if (!IsNeeded(*op, needed)) continue;
    for (const Use& use : op->uses) {
      if (use.memory >= 0) need(use.memory);
    }
    kept.push_back(std::move(*op));
  }
  std::reverse(kept.begin(), kept.end());
  operators_ = std::move(kept);
  for (size_t m = 0; m < memories_.size(); ++m) {
    Memory& memory = memories_[m];
    if (!held_needed[m]) {
      memory.held.reset();
      memory.outside.reset();
    } else if (memory.outside == nullptr) {
      memory.held_place = TensorPlace(memory.held);
      memory.outside = outside->Of(memory.held);
    }
  }
  by_storage_.Clear();
  last_used_.clear();
  std::vector<bool> later(memories_.size(), false);
  for (const int memory : wanted_) later[static_cast<size_t>(memory)] = true;
  last_used_.resize(operators_.size());
  for (size_t i = operators_.size(); i-- > 0;) {
    const auto note = [&](int memory) {
      if (memory < 0 || later[static_cast<size_t>(memory)]) return;
      later[static_cast<size_t>(memory)] = true;
      last_used_[i].push_back(memory);
    };
    for (const Use& use : operators_[i].uses) note(use.memory);
    for (const Result& result : operators_[i].results) note(result.memory);
  }
}

}  // namespace tessera
