#include "engine/observe/flops_profile.h"

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/core/ivalue.h"
#include "ATen/record_function.h"
#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "sharding/flat/flat_parameter.h"
#include "sharding/flat/registry.h"
#include "sharding/trace/operators/operator_flops.h"

namespace tessera {
namespace {

// Within an operator that is counted nothing is.
thread_local int counted_depth = 0;

// The arguments of one operator call.
struct Call : at::ObserverContext {
  std::vector<at::IValue> in;
};

// Where callbacks, which carry no data of their own, find what they fill: one
// profile at a time.
struct Shared {
  absl::Mutex mutex;
  FlopCounts* counts ABSL_GUARDED_BY(mutex) = nullptr;
  std::string unit ABSL_GUARDED_BY(mutex);
};
Shared& TheShared() {
  static auto* const shared = new Shared;
  return *shared;
}

void NoteUnit(const at::RecordFunction& fn) {
  for (const at::IValue& input : fn.inputs()) {
    if (!input.isTensor()) continue;
    const StorageOwner owner = Registry::Global().Find(input.toTensor());
    if (!owner) continue;
    Shared& shared = TheShared();
    absl::MutexLock lock(&shared.mutex);
    shared.unit = owner.flat->name();
    return;
  }
}

void Count(const char* op, int64_t flops) {
  Shared& shared = TheShared();
  absl::MutexLock lock(&shared.mutex);
  if (shared.counts == nullptr) return;
  const std::string unit = shared.unit.empty() ? "(before any)" : shared.unit;
  for (FlopCounts::Sum* sum :
       {&shared.counts->by_operator[op], &shared.counts->by_unit[unit]}) {
    ++sum->calls;
    sum->flops += flops;
  }
}

std::unique_ptr<at::ObserverContext> Begin(const at::RecordFunction& fn) {
  if (counted_depth > 0) return nullptr;
  NoteUnit(fn);
  if (!HasOperatorFlops(fn.name())) return nullptr;
  auto call = std::make_unique<Call>();
  call->in.assign(fn.inputs().begin(), fn.inputs().end());
  ++counted_depth;
  return call;
}

void End(const at::RecordFunction& fn, at::ObserverContext* context) {
  const auto* const call = static_cast<Call*>(context);
  if (call == nullptr) return;
  --counted_depth;
  if (fn.outputs().empty()) return;  // it has thrown
  Count(fn.name(),
        OperatorFlops(fn.name(), OperatorArguments(call->in), fn.outputs()));
}

}  // namespace

int64_t FlopCounts::total() const {
  int64_t sum = 0;
  for (const auto& [op, of] : by_operator) sum += of.flops;
  return sum;
}

void FlopsProfile::Start() {
  Shared& shared = TheShared();
  {
    absl::MutexLock lock(&shared.mutex);
    if (shared.counts != nullptr) return;  // another engine's runs
    shared.counts = &counts_;
    shared.unit.clear();
  }
  running_ = at::addGlobalCallback(at::RecordFunctionCallback(Begin, End)
                                       .needsInputs(true)
                                       .needsOutputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
}

void FlopsProfile::Stop(double seconds) {
  if (!running_.has_value()) return;
  at::removeCallback(*running_);
  running_.reset();
  Shared& shared = TheShared();
  absl::MutexLock lock(&shared.mutex);
  shared.counts = nullptr;
  seconds_ = seconds;
  done_ = true;
}

FlopsProfile::~FlopsProfile() { Stop(0); }

}  // namespace tessera
