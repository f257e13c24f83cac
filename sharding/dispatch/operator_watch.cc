#include "sharding/dispatch/operator_watch.h"

#include <atomic>
#include <utility>

#include "base/torch/torch_scope.h"
#include "c10/core/impl/LocalDispatchKeySet.h"

namespace tessera {
namespace {

thread_local OperatorWatch* t_watch = nullptr;
thread_local bool t_replays = false, t_no_values = false;
std::atomic<ParameterUses*> parameter_uses{nullptr};

}  // namespace

OperatorWatch* OperatorWatch::Current() { return t_watch; }

void SetWatch(OperatorWatch* watch) { t_watch = watch; }

WatchScope::WatchScope(OperatorWatch* watch)
    : before_(std::exchange(t_watch, watch)) {}
WatchScope::~WatchScope() { t_watch = before_; }

ReplayMark::ReplayMark() : before_(std::exchange(t_replays, true)) {}
ReplayMark::~ReplayMark() { t_replays = before_; }
bool ReplayMark::IsSet() { return t_replays; }

NoValues::NoValues() : before_(std::exchange(t_no_values, true)) {}
NoValues::~NoValues() { t_no_values = before_; }
bool NoValues::IsSet() { return t_no_values; }

void FollowAll(bool all) {
  c10::impl::tls_set_dispatch_key_included(kTagKey, all);
}
bool FollowsAll() { return c10::impl::tls_is_dispatch_key_included(kTagKey); }

void SetParameterUses(ParameterUses* uses) { parameter_uses = uses; }
ParameterUses* CurrentParameterUses() {
  return parameter_uses.load(std::memory_order_relaxed);
}

}  // namespace tessera
