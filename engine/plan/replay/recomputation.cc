#include "engine/plan/replay/recomputation.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "engine/plan/replay/recomputer.h"

namespace tessera {

using Kind = TraceEvent::Kind;

Recomputer::Recomputer(const Trace& trace, const RecomputationOptions& options)
    : trace_(trace),
      options_(options),
      backward_(static_cast<int64_t>(trace.backward)),
      end_(static_cast<int64_t>(trace.events.size())),
      lives_(trace.allocations.size()) {}

// As ThreadUnits::Used.
void Recomputer::FindRegions() {
  int open = -1, module = RecomputationOptions::kNone;
  bool ran = false;
  for (int64_t i = 0; i < backward_; ++i) {
    const TraceEvent& e = event(i);
    const int now = e.kind == Kind::kBegin
                        ? options_.module_of[static_cast<size_t>(e.what)]
                        : RecomputationOptions::kUnseen;
    const bool anew = open >= 0 && ran && e.kind == Kind::kBegin &&
                      e.what == regions_.back().first;
    if (now != RecomputationOptions::kUnseen && (now != module || anew)) {
      open = now < 0 ? -1 : static_cast<int>(regions_.size());
      if (now >= 0) regions_.push_back({e.what});
      module = now;
      ran = false;
    }
    region_of_.push_back(open);
    if (open < 0) continue;
    regions_.back().end = i + 1;
    ran |= e.kind == Kind::kOperator;
  }
}

void Recomputer::FindLives() {
  for (size_t i = 0; i < lives_.size(); ++i) {
    lives_[i].freed = end_;
    lives_[i].cast = trace_.allocations[i].cast_of >= 0;
    lives_[i].last_forward_use = trace_.allocations[i].last_forward_use;
  }
  for (int64_t i = 0; i < end_; ++i) {
    const TraceEvent& e = event(i);
    if (e.kind == Kind::kFree) life(e.what).freed = i;
    if (e.kind != Kind::kAllocate) continue;
    life(e.what).bytes = e.bytes;
    life(e.what).forward = i < backward_;
    if (i < backward_) life(e.what).maker = RegionOf(i);
  }
}

void Recomputer::FindOperations() {
  TracedOperation next;
  size_t u = 0;
  for (int64_t i = 0; i < backward_; ++i) {
    const TraceEvent& e = event(i);
    if (e.kind == Kind::kTouch) next.touched.push_back(e.what);
    if (e.kind == Kind::kAllocate) next.made.push_back(e.what);
    if (e.kind != Kind::kOperator) continue;
    next.event = i;
    for (; u < trace_.uses.size() && trace_.uses[u].event <= i; ++u) {
      next.uses.push_back(trace_.uses[u]);
    }
    const int region = RegionOf(i);
    if (region >= 0) {
      regions_[static_cast<size_t>(region)].operations.push_back(
          std::move(next));
    }
    next = {};
  }
}

int64_t Recomputer::EndOfOperator(int64_t i) const {
  while (i < end_ && event(i).kind != Kind::kOperator) ++i;
  return i;
}

// What a node saved is unpacked before any of it runs.
int64_t Recomputer::NodeStart(int64_t i) const {
  const int64_t ends = EndOfOperator(i);
  if (ends == end_) return i;
  while (i > backward_ && event(i - 1).forward == event(ends).forward &&
         event(i - 1).kind != Kind::kGradient) {
    --i;
  }
  return i;
}

// A product's node unpacks the second factor first, mostly a parameter.
std::vector<int32_t> Recomputer::UnpackedFirst(int64_t start) const {
  std::vector<int32_t> parameters;
  const int64_t ends = EndOfOperator(start);
  const std::string& name =
      trace_.operators[static_cast<size_t>(event(ends).what)];
  if (name != "aten::mm" && name != "aten::bmm") return parameters;
  for (int64_t i = start; i < end_ && event(i).forward == event(ends).forward;
       ++i) {
    if (event(i).kind == Kind::kTouch) parameters.push_back(event(i).what);
  }
  return parameters;
}

void Recomputer::FindBackwardUses() {
  for (const TracedUse& use : trace_.uses) {
    if (use.event < backward_) continue;
    TracedLife& used = life(use.allocation);
    const int64_t ends = EndOfOperator(use.event);
    if (ends == end_) continue;
    const int region = RegionOf(event(ends).forward);
    if (region >= 0) {
      regions_[static_cast<size_t>(region)].saved.try_emplace(
          use.allocation, NodeStart(use.event));
    } else {
      used.stays = true;
    }
    if (used.maker >= 0 && region == used.maker) {
      if (used.own_use < 0) used.own_use = NodeStart(use.event);
    } else {
      used.other_use = ends + 1;
    }
  }
  for (int64_t i = backward_; i < end_; ++i) {
    if (event(i).kind != Kind::kOperator) continue;
    const int region = RegionOf(event(i).forward);
    if (region >= 0) regions_[static_cast<size_t>(region)].last_node = i + 1;
  }
}

// A node of its own region saved it: its slot gives it up. Not what others
// saved alone.
bool Recomputer::IsWanted(const TracedLife& life) const {
  return life.freed >= backward_ && !life.cast &&
         (life.own_use >= 0 || life.other_use < 0);
}

// As Tape::End: until the region is closed, whatever becomes of it.
void Recomputer::FindHeld(int number) {
  if (options_.keeps == nullptr) return;
  TracedRegion& region = regions_[static_cast<size_t>(number)];
  for (const TracedOperation& op : region.operations) {
    const std::string& name =
        trace_.operators[static_cast<size_t>(event(op.event).what)];
    const bool keeps = options_.keeps(name);
    for (const int32_t made : op.made) {
      if (keeps) life(made).held = true;
      if (keeps) life(made).held_until = region.end;
    }
  }
  for (const TracedOperation& op : region.operations) {
    for (const TracedUse& use : op.uses) {
      if (use.written) life(use.allocation).held = false;
    }
  }
}

// As Tape::Close. What the tape holds then.
std::set<int32_t> Recomputer::FindNeeded(int number,
                                         const std::vector<int32_t>& wanted) {
  TracedRegion& region = regions_[static_cast<size_t>(number)];
  std::set<int32_t> needed, holds;
  const auto need = [&](int32_t a) {
    (life(a).maker == number && !life(a).held ? needed : holds).insert(a);
  };
  for (const int32_t a : wanted) need(a);
  const auto is_needed = [&](int32_t a) { return needed.count(a) > 0; };
  for (auto op = region.operations.rbegin(); op != region.operations.rend();
       ++op) {
    const bool runs =
        std::any_of(op->made.begin(), op->made.end(), is_needed) ||
        std::any_of(op->uses.begin(), op->uses.end(), [&](const TracedUse& u) {
          return u.written && is_needed(u.allocation);
        });
    if (!runs) continue;
    for (const TracedUse& use : op->uses) need(use.allocation);
    region.needed.push_back(&*op);
  }
  std::reverse(region.needed.begin(), region.needed.end());
  return holds;
}

// As RecomputedUnits' Module::Close. The region that backward follows at once
// is kept.
void Recomputer::Close(int number) {
  TracedRegion& region = regions_[static_cast<size_t>(number)];
  FindHeld(number);
  if (region.end == backward_) return;
  if (!options_.recomputes) return Move({}, &region);
  std::vector<int32_t> wanted;
  int64_t bytes = 0;
  for (const TracedOperation& op : region.operations) {
    for (const int32_t made : op.made) {
      if (!IsWanted(life(made))) continue;
      wanted.push_back(made);
      if (!life(made).held) bytes += life(made).bytes;
    }
  }
  if (bytes == 0) return;
  if (kept_bytes_ + bytes <= options_.budget_bytes) {
    kept_bytes_ += bytes;
    return;
  }
  std::set<int32_t> held_by_tape;
  for (const int32_t a : FindNeeded(number, wanted)) {
    if (life(a).cast && life(a).maker != number) continue;  // a recipe
    held_by_tape.insert(a);
    if (Moves(a)) continue;
    life(a).held_until = std::max(life(a).held_until, region.last_node);
  }
  for (const int32_t a : wanted) {
    if (life(a).held) continue;
    region.given_up.push_back(a);
    const int64_t use = life(a).own_use;
    if (use >= 0 && (region.restored < 0 || use < region.restored)) {
      region.restored = use;
    }
  }
  Move(held_by_tape, &region);
}

// Whoever else has it lets it go.
int64_t Recomputer::GoneFrom(const TracedRegion& region,
                             const TracedLife& life) const {
  const int64_t used =
      life.last_forward_use < 0 ? 0 : EndOfOperator(life.last_forward_use) + 1;
  return std::max({region.end, used, life.other_use, life.held_until});
}

// As Tape::Replay: what is wanted stays to the end, all else until it was last
// used.
Rerun Recomputer::RerunOf(const TracedRegion& region) const {
  Rerun rerun{region.restored, UnpackedFirst(region.restored), {}};
  std::map<int32_t, size_t> last_used;
  for (size_t k = 0; k < region.needed.size(); ++k) {
    for (const int32_t a : region.needed[k]->made) last_used[a] = k;
    for (const TracedUse& use : region.needed[k]->uses) {
      const auto found = last_used.find(use.allocation);
      if (found != last_used.end()) found->second = k;
    }
  }
  for (const int32_t a : region.given_up) {
    last_used[a] = region.needed.size() - 1;
  }
  std::vector<std::vector<int32_t>> gone(region.needed.size());
  const auto step = [&](Kind kind, int32_t what, int64_t bytes) {
    rerun.steps.push_back({kind, true, what, -1, -1, bytes});
  };
  for (size_t k = 0; k < region.needed.size(); ++k) {
    const TracedOperation& op = *region.needed[k];
    for (const int32_t parameter : op.touched) {
      step(Kind::kTouch, parameter, 0);
    }
    for (const int32_t a : op.made) {
      const bool comes_back =
          std::find(region.given_up.begin(), region.given_up.end(), a) !=
              region.given_up.end() &&
          life(a).freed > region.restored &&
          GoneFrom(region, life(a)) <= region.restored;
      if (!comes_back) gone[last_used[a]].push_back(a);
      step(Kind::kAllocate, comes_back ? a : -1, life(a).bytes);
    }
    rerun.steps.push_back(event(op.event));
    for (const int32_t a : gone[k]) step(Kind::kFree, -1, life(a).bytes);
  }
  return rerun;
}

Recomputation Recomputer::Run() {
  Recomputation made;
  made.outlives.resize(lives_.size(), false);
  FindRegions();
  FindLives();
  FindOperations();
  FindBackwardUses();
  for (size_t r = 0; r < regions_.size(); ++r) Close(static_cast<int>(r));
  std::vector<bool> given_up(lives_.size(), false);
  for (const TracedRegion& region : regions_) {
    made.recorded += static_cast<int64_t>(region.operations.size());
    for (const int32_t a : region.given_up) {
      given_up[static_cast<size_t>(a)] = true;
      const int64_t from = GoneFrom(region, life(a));
      const bool there = region.restored >= 0 && from > region.restored;
      if (!there) made.absences.push_back({a, from, -1, -1});
    }
    if (region.restored >= 0) made.reruns.push_back(RerunOf(region));
  }
  AddMoved(&made);
  for (size_t i = 0; i < lives_.size(); ++i) {
    if (given_up[i] || lives_[i].held_until <= lives_[i].freed) continue;
    made.outlives[i] = true;
    made.absences.push_back(
        {static_cast<int32_t>(i), lives_[i].held_until, -1, -1});
  }
  std::stable_sort(
      made.reruns.begin(), made.reruns.end(),
      [](const auto& a, const auto& b) { return a.event < b.event; });
  return made;
}

Recomputation Recompute(const Trace& trace,
                        const RecomputationOptions& options) {
  if (options.module_of.empty()) {
    Recomputation none;
    none.outlives.resize(trace.allocations.size(), false);
    return none;
  }
  return Recomputer(trace, options).Run();
}

}  // namespace tessera
