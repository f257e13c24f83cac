#include "data/text/best_fit.h"

#include <limits>
#include <utility>

#include "absl/container/btree_set.h"
#include "base/check.h"

namespace tessera {
namespace {

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// Holds bins by the room that they have left: bins of the same room are one
// stack.
class OpenBins {
 public:
  explicit OpenBins(int64_t capacity)
      : top_(static_cast<size_t>(capacity) + 1, kNone) {}

  // Takes out the bin with the least room that fits `length`, and returns it
  // and its room; kNone if there is none.
  uint32_t Take(int64_t length, int64_t* room) {
    const auto found = rooms_.lower_bound(static_cast<int32_t>(length));
    if (found == rooms_.end()) return kNone;
    *room = *found;
    uint32_t& top = top_[static_cast<size_t>(*room)];
    const uint32_t bin = top;
    top = below_[bin];
    if (top == kNone) rooms_.erase(found);
    return bin;
  }

  uint32_t Open() {
    below_.push_back(kNone);
    return static_cast<uint32_t>(below_.size() - 1);
  }

  void Put(uint32_t bin, int64_t room) {
    if (room == 0) return;
    uint32_t& top = top_[static_cast<size_t>(room)];
    if (top == kNone) rooms_.insert(static_cast<int32_t>(room));
    below_[bin] = top;
    top = bin;
  }

  uint32_t num_bins() const { return static_cast<uint32_t>(below_.size()); }

 private:
  absl::btree_set<int32_t> rooms_;  // rooms of which there are bins
  std::vector<uint32_t> top_;       // by room
  std::vector<uint32_t> below_;     // by bin: the next of the same room
};

// Sorts stably by counting. `key(i)` of piece i is below `keys`; returns where
// each key's pieces begin.
template <typename Key>
std::vector<uint32_t> SortByCounting(const std::vector<TextPiece>& from,
                                     int64_t keys, const Key& key,
                                     std::vector<TextPiece>* to) {
  std::vector<uint32_t> firsts(static_cast<size_t>(keys) + 1);
  for (size_t i = 0; i < from.size(); ++i) ++firsts[key(i) + 1];
  for (size_t k = 1; k < firsts.size(); ++k) firsts[k] += firsts[k - 1];
  std::vector<uint32_t> next(firsts.begin(), firsts.end() - 1);
  to->assign(from.size(), TextPiece(0, 1));
  for (size_t i = 0; i < from.size(); ++i) (*to)[next[key(i)]++] = from[i];
  return firsts;
}

}  // namespace

PackedPieces PackBestFit(std::vector<TextPiece> pieces, int64_t capacity) {
  TESSERA_CHECK_LE(capacity, TextPiece::kMaxLength);
  TESSERA_CHECK_LT(pieces.size(), kNone);
  std::vector<TextPiece> sorted;
  SortByCounting(
      pieces, capacity,
      [&](size_t i) {
        TESSERA_CHECK_LE(pieces[i].length(), capacity);
        return static_cast<size_t>(capacity - pieces[i].length());
      },
      &sorted);
  OpenBins open(capacity);
  std::vector<uint32_t> bins(sorted.size());  // by piece
  for (size_t i = 0; i < sorted.size(); ++i) {
    const int64_t length = sorted[i].length();
    int64_t room = capacity;
    bins[i] = open.Take(length, &room);
    if (bins[i] == kNone) bins[i] = open.Open();
    open.Put(bins[i], room - length);
  }
  PackedPieces packed;
  packed.pieces = std::move(pieces);  // reuses its memory
  packed.firsts = SortByCounting(
      sorted, open.num_bins(), [&](size_t i) { return size_t{bins[i]}; },
      &packed.pieces);
  return packed;
}

}  // namespace tessera
