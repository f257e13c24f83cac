// Mixture combines several sources, each with a share of its own, as
// Megatron-LM's blended dataset does.
//
//   shares      a 0.5, b 0.3, c 0.2
//   index       0 1 2 3 4 5 6 7 8 9 | 10 ...      the period is 10: its table
//   source      a b a c a b a c b a | a  ...      says whose turn it is
//   of source a 0   1   2   3     4 | 5           place in its own order
//
// Which sample comes at a place depends on (sources, seed, index) alone and is
// found in O(1), so any rank of any world size, any thread and any resumed run
// sees the same. Each source is shuffled anew in each of its own epochs
// (data/index_permutation.h).
//
// Shares. After any number t of samples, source d has had t * share(d) samples,
// give or take less than one. Turns are assigned as by Tijdeman, The chairman
// assignment problem (Discrete Mathematics 32, 1980), whose bound is 1 - 1 / (2
// k - 2) for k >= 2 sources. (Taking the largest deficit, as Megatron's
// build_blending_indices does, has no such bound.) Weights become whole turns
// of a period: exactly, where they have a common denominator of up to 65536
// (0.7 and 0.3; 3 and 1), otherwise rounded to multiples of 2^-20 of the total.
//
// A loader takes its order from data/mixture_order.h, which assigns places of
// the mixture to ranks.
//
// Threads: const methods may run concurrently. LOCAL: ranks agree by their
// options.
#ifndef DATA_MIXTURE_H_
#define DATA_MIXTURE_H_

#include <cstdint>
#include <limits>
#include <vector>

#include "absl/status/statusor.h"

namespace tessera {

struct MixtureSource {
  int64_t num_samples = 0;  // at least 1
  double weight = 0;        // above 0; only its fraction of the sum counts
};

enum class MixtureEnd {
  kRepeat,  // a source that ends starts over, in another order
  kStop,    // the first source that ends is the end of all
};

struct MixtureOptions {
  std::vector<MixtureSource> sources;  // 1 to 256
  uint64_t seed = 0;
  bool shuffle = true;  // each source; else 0, 1, 2, ...
  MixtureEnd end = MixtureEnd::kRepeat;
};

struct MixedSample {
  int source = 0;     // its place in MixtureOptions::sources
  int64_t index = 0;  // of the source
  int64_t epoch = 0;  // how often the source has been gone through before
};
inline bool operator==(const MixedSample& a, const MixedSample& b) {
  return a.source == b.source && a.index == b.index && a.epoch == b.epoch;
}

class Mixture {
 public:
  // Takes O(period * sources) time and keeps 8 bytes for each turn of the
  // period, at most 8 MiB. Returns InvalidArgument naming a source that has no
  // samples, a weight that is not a number above 0, or a weight below 2^-21 of
  // the total.
  static absl::StatusOr<Mixture> Create(const MixtureOptions& options);

  // REQUIRES: 0 <= index < num_samples().
  MixedSample At(int64_t index) const;

  // With kStop the number of samples before the first source would start over;
  // otherwise kEndless.
  static constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();
  int64_t num_samples() const { return num_samples_; }

  int num_sources() const { return static_cast<int>(options_.sources.size()); }
  // Returns the fraction of all samples that source `source` has, after
  // rounding.
  double share(int source) const;
  // Returns a fingerprint of all that decides which sample comes where, for
  // comparison.
  uint64_t fingerprint() const;

 private:
  struct Turn {
    int32_t source;
    int32_t earlier;  // turns of it before in the period
  };

  explicit Mixture(const MixtureOptions& options) : options_(options) {}
  void FillTurns();
  void FindEnd();

  MixtureOptions options_;
  std::vector<int64_t> turns_of_;  // by source, in a period
  std::vector<Turn> turns_;        // [period]
  int64_t num_samples_ = kEndless;
};

}  // namespace tessera
#endif  // DATA_MIXTURE_H_
