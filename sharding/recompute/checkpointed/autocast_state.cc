#include "sharding/recompute/checkpointed/autocast_state.h"

#include "ATen/autocast_mode.h"

namespace tessera {

namespace autocast = at::autocast;

namespace {

int Nesting() {
  const int within = autocast::increment_nesting();
  autocast::decrement_nesting();
  return within - 1;
}

}  // namespace

AutocastState AutocastState::Capture() {
  AutocastState state;
  for (c10::DeviceType type : autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    state.devices_.push_back({type, autocast::is_autocast_enabled(type),
                              autocast::get_autocast_dtype(type)});
  }
  return state;
}

void AutocastState::Set() const {
  for (const Device& d : devices_) {
    autocast::set_autocast_enabled(d.type, d.on);
    autocast::set_autocast_dtype(d.type, d.dtype);
  }
}

AutocastStateScope::AutocastStateScope(const AutocastState& state)
    : before_(AutocastState::Capture()),
      cache_before_(autocast::is_autocast_cache_enabled()),
      nesting_before_(Nesting()) {
  state.Set();
  autocast::set_autocast_cache_enabled(false);
}

AutocastStateScope::~AutocastStateScope() {
  before_.Set();
  autocast::set_autocast_cache_enabled(cache_before_);
  for (int n = Nesting(); n > nesting_before_; --n) {
    autocast::decrement_nesting();
  }
  for (int n = Nesting(); n < nesting_before_; ++n) {
    autocast::increment_nesting();
  }
}

}  // namespace tessera
