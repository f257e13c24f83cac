// TouchHistory: records the order in which flats were used, forward and
// backward, and predicts what comes next.
//
// There is no recorded "step" to replay: evaluation, sampling, two forwards or
// a checkpoint's recomputation may come at any time. Instead every touch is
// appended to one history, and the place in the past that looks most like now
// (the last touches are the same) says what followed then. A training loop
// finds itself one step back, an evaluation one evaluation back.
//
//   history  ... 0 1 2 2 1 0 | 0 1 2 2 1
//                    ^ like now        ^ now      expected next: 1 0 |
//
// Everything depends on the order of touches alone, so ranks that run the same
// operators expect the same. Knows no torch.
//
// Threads: none of its own; the caller orders the calls.
#ifndef SHARDING_FLAT_TOUCH_HISTORY_H_
#define SHARDING_FLAT_TOUCH_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tessera {

class TouchHistory {
 public:
  // A border in the place of a flat: the end of a backward or a step. Borders
  // without a touch between them are one, however many calls end a pass.
  static constexpr int kBorder = -1;
  static constexpr int kUnknown = -2;

  // `numel[i]`: elements of flat i. At least the last capacity / 2 touches are
  // remembered; some steps of every model by default.
  explicit TouchHistory(std::vector<int64_t> numel, size_t capacity = 0);

  // `flat` (or kBorder) is touched now, in a backward or not. Returns whether
  // that was expected.
  bool Append(int flat, bool backward = false);

  // The k-th touch after now, k = 0 the next: a flat, kBorder, or kUnknown
  // where the past does not tell.
  int Expected(size_t k) const;
  bool KnowsNext() const { return Expected(0) != kUnknown; }

  // Whether `flat` is expected again before a border, with at most `elements`
  // touched until then (DeepSpeed's reuse distance).
  bool ReusedWithin(int flat, int64_t elements) const;

 private:
  // Lengths of the contexts looked for, longest first.
  static constexpr size_t kContexts[] = {8, 4, 2, 1};
  static constexpr size_t kNone = SIZE_MAX;

  bool AppendTouch(int touch);
  uint64_t Context(size_t end, size_t length) const;
  void Index(size_t end);
  void FindPlace();
  void Forget();

  std::vector<int64_t> numel_;
  const size_t capacity_;
  static int FlatOf(int touch) { return touch < 0 ? touch : touch / 2; }

  std::vector<int> touches_;  // flat * 2 + backward, or kBorder
  // For each context, where it ended last.
  std::unordered_map<uint64_t, size_t> index_[4];
  size_t place_ = kNone;  // looks like the last touch
};

}  // namespace tessera
#endif  // SHARDING_FLAT_TOUCH_HISTORY_H_
