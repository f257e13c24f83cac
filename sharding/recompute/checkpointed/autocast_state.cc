#include "sharding/recompute/checkpointed/autocast_state.h"

#include "ATen/autocast_mode.h"

namespace tessera {

namespace autocast = at::autocast;

AutocastState AutocastState::Capture() {
  AutocastState state;
  for (c10::DeviceType type : autocast::_AUTOCAST_SUPPORTED_DEVICES) {
    if (!autocast::is_autocast_enabled(type)) continue;
    state.on_.push_back({type, autocast::get_autocast_dtype(type)});
  }
  return state;
}

AutocastStateScope::AutocastStateScope(const AutocastState& state)
    : before_(AutocastState::Capture()),
      cache_before_(autocast::is_autocast_cache_enabled()) {
  for (const auto& d : before_.on_) {
    autocast::set_autocast_enabled(d.type, false);
  }
  for (const auto& d : state.on_) {
    dtypes_before_.push_back({d.type, autocast::get_autocast_dtype(d.type)});
    autocast::set_autocast_enabled(d.type, true);
    autocast::set_autocast_dtype(d.type, d.dtype);
  }
  autocast::set_autocast_cache_enabled(false);
}

AutocastStateScope::~AutocastStateScope() {
  for (const auto& d : dtypes_before_) {
    autocast::set_autocast_enabled(d.type, false);
    autocast::set_autocast_dtype(d.type, d.dtype);
  }
  for (const auto& d : before_.on_) {
    autocast::set_autocast_enabled(d.type, true);
  }
  autocast::set_autocast_cache_enabled(cache_before_);
}

}  // namespace tessera
