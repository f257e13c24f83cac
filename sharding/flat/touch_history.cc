#include "sharding/flat/touch_history.h"

#include <algorithm>

namespace tessera {

TouchHistory::TouchHistory(std::vector<int64_t> numel, size_t capacity)
    : numel_(std::move(numel)),
      capacity_(capacity > 0 ? capacity
                             : std::max<size_t>(4096, 16 * numel_.size())) {
  Append(kBorder);
}

bool TouchHistory::Append(int flat, bool backward) {
  if (touches_.size() >= capacity_) Forget();
  if (flat == kBorder && !touches_.empty() && touches_.back() == kBorder) {
    return true;
  }
  return AppendTouch(flat < 0 ? flat : flat * 2 + (backward ? 1 : 0));
}

bool TouchHistory::AppendTouch(int touch) {
  const bool as_expected = place_ != kNone && place_ + 1 < touches_.size() &&
                           touches_[place_ + 1] == touch;
  touches_.push_back(touch);
  if (as_expected) {
    ++place_;
  } else {
    FindPlace();
  }
  Index(touches_.size() - 1);
  return as_expected;
}

int TouchHistory::Expected(size_t k) const {
  if (place_ == kNone || place_ + 1 + k >= touches_.size()) return kUnknown;
  return FlatOf(touches_[place_ + 1 + k]);
}

bool TouchHistory::ReusedWithin(int flat, int64_t elements) const {
  for (size_t k = 0; elements >= 0; ++k) {
    const int next = Expected(k);
    if (next == flat) return true;
    if (next < 0) return false;
    elements -= numel_[static_cast<size_t>(next)];
  }
  return false;
}

uint64_t TouchHistory::Context(size_t end, size_t length) const {
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (size_t i = end + 1 - length; i <= end; ++i) {
    hash = (hash ^ static_cast<uint64_t>(touches_[i] + 2)) * 1099511628211u;
  }
  return hash;
}

void TouchHistory::Index(size_t end) {
  for (size_t c = 0; c < std::size(kContexts); ++c) {
    if (end + 1 >= kContexts[c]) index_[c][Context(end, kContexts[c])] = end;
  }
}

void TouchHistory::FindPlace() {
  const size_t now = touches_.size() - 1;
  place_ = kNone;
  for (size_t c = 0; c < std::size(kContexts) && place_ == kNone; ++c) {
    if (now + 1 < kContexts[c]) continue;
    const auto it = index_[c].find(Context(now, kContexts[c]));
    if (it != index_[c].end()) place_ = it->second;
  }
}

// Keeps the newer half.
void TouchHistory::Forget() {
  const auto half = static_cast<std::ptrdiff_t>(capacity_ / 2);
  const std::vector<int> kept(touches_.end() - half, touches_.end());
  touches_.clear();
  for (auto& index : index_) index.clear();
  place_ = kNone;
  for (int touch : kept) AppendTouch(touch);
}

}  // namespace tessera
