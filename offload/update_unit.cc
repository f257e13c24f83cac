#include "offload/update_unit.h"

#include <utility>

#include "base/check.h"
#include "base/trace/trace.h"

namespace tessera {

absl::Status StreamFetch::Wait() const {
  absl::Status status = taken_.future().Wait();
  status.Update(read_.Wait());
  return status;
}

std::shared_ptr<StreamUnit> StreamUnit::Of(StreamedUpdate update, bool early) {
  auto unit = std::make_shared<StreamUnit>();
  unit->numel = update.numel;
  if (early) unit->fate = Fate::kSpeculative;
  for (const StreamedUpdate::State& each : update.states) {
    const TierRoom& room = each.buffer->room();
    const bool to_next = early && each.written;
    TESSERA_CHECK(!to_next || each.buffer->next().defined())
        << each.buffer->what();
    unit->places.push_back({room.extent(),
                            (to_next ? each.buffer->next() : room).extent(),
                            room.zeros()});
    unit->changed.push_back(each.written ? each.buffer : nullptr);
  }
  if (update.unit.empty() && !update.states.empty()) {
    update.unit = std::string(UnitInText(update.states[0].buffer->what()));
  }
  unit->update = std::move(update);
  return unit;
}

// Where they lie is this thread's to ask; whether they are zeros is not, while
// they are being written.
std::shared_ptr<StreamUnit> StreamUnit::Reading(
    const std::vector<TieredBuffer*>& states) {
  auto unit = std::make_shared<StreamUnit>();
  for (TieredBuffer* const state : states) {
    unit->numel = state->numel();
    unit->update.states.push_back({state, /*read=*/true, /*written=*/false});
    unit->places.push_back({state->room().extent(), {}, /*zeros=*/false});
  }
  return unit;
}

bool StreamUnit::ReadsFirst(const StreamUnit& predicted) const {
  if (numel != predicted.numel || places.size() < predicted.places.size()) {
    return false;
  }
  for (size_t i = 0; i < predicted.places.size(); ++i) {
    if (update.states[i].buffer != predicted.update.states[i].buffer ||
        !update.states[i].read || places[i].zeros ||
        places[i].from.begin != predicted.places[i].from.begin) {
      return false;
    }
  }
  return true;
}

}  // namespace tessera
