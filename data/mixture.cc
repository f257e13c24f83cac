#include "data/mixture.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/numeric/int128.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/check.h"
#include "base/status.h"
#include "data/index_permutation.h"

namespace tessera {
namespace {

constexpr size_t kMaxSources = 256;
constexpr int64_t kMaxDenominator = 65536;
constexpr int64_t kFinePeriod = int64_t{1} << 20;

absl::Status Check(const MixtureOptions& options) {
  if (options.sources.empty() || options.sources.size() > kMaxSources) {
    return absl::InvalidArgumentError(
        absl::StrCat("mixture: expected 1 to ", kMaxSources, " sources, got ",
                     options.sources.size()));
  }
  for (size_t i = 0; i < options.sources.size(); ++i) {
    const MixtureSource& source = options.sources[i];
    if (source.num_samples < 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("mixture: source ", i, ": expected at least 1 sample, ",
                       "got ", source.num_samples));
    }
    if (!(source.weight > 0) || !std::isfinite(source.weight)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "mixture: source ", i, ": expected a weight above 0, got ",
          source.weight, "; leave out a source that is not wanted"));
    }
  }
  return absl::OkStatus();
}

// Returns the least denominator that makes all shares whole; 0 if there is
// none.
int64_t CommonDenominator(const std::vector<double>& shares) {
  // With this tolerance less than one of 10^9 samples goes to another source.
  constexpr double kTolerance = 1e-9;
  for (int64_t q = 1; q <= kMaxDenominator; ++q) {
    const auto whole = [q](double share) {
      const double turns = share * static_cast<double>(q);
      return turns > 0.5 && std::abs(turns - std::round(turns)) <= kTolerance;
    };
    if (std::all_of(shares.begin(), shares.end(), whole)) return q;
  }
  return 0;
}

// Returns whole turns that add up to `period`: rounded down, and one more for
// those that lost most, the first among equals.
std::vector<int64_t> RoundedTurns(const std::vector<double>& shares,
                                  int64_t period) {
  std::vector<int64_t> turns;
  std::vector<std::pair<double, size_t>> lost;
  for (size_t i = 0; i < shares.size(); ++i) {
    const double exact = shares[i] * static_cast<double>(period);
    turns.push_back(static_cast<int64_t>(std::floor(exact)));
    lost.emplace_back(std::floor(exact) - exact, i);
  }
  std::sort(lost.begin(), lost.end());
  int64_t rest =
      period - std::accumulate(turns.begin(), turns.end(), int64_t{});
  for (size_t i = 0; rest > 0; i = (i + 1) % lost.size(), --rest) {
    ++turns[lost[i].second];
  }
  return turns;
}

absl::StatusOr<std::vector<int64_t>> WholeTurns(const MixtureOptions& options) {
  double sum = 0;
  for (const MixtureSource& source : options.sources) sum += source.weight;
  std::vector<double> shares;
  for (const MixtureSource& source : options.sources) {
    shares.push_back(source.weight / sum);
  }
  const int64_t denominator = CommonDenominator(shares);
  std::vector<int64_t> turns =
      RoundedTurns(shares, denominator > 0 ? denominator : kFinePeriod);
  // Products of a denominator are whole except for the last bits of a double.
  for (size_t i = 0; denominator > 0 && i < turns.size(); ++i) {
    turns[i] = std::llround(shares[i] * static_cast<double>(denominator));
  }
  for (size_t i = 0; i < turns.size(); ++i) {
    if (turns[i] > 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "mixture: source ", i, ": its weight, ", options.sources[i].weight,
        " of ", sum, ", is less than 1 of ", kFinePeriod));
  }
  return turns;
}

}  // namespace

absl::StatusOr<Mixture> Mixture::Create(const MixtureOptions& options) {
  TESSERA_RETURN_IF_ERROR(Check(options));
  Mixture mixture(options);
  TESSERA_ASSIGN_OR_RETURN(mixture.turns_of_, WholeTurns(options));
  mixture.FillTurns();
  if (options.end == MixtureEnd::kStop) mixture.FindEnd();
  return mixture;
}

// Applies Tijdeman's rule, in integers. Of the sources that are behind by 1 /
// slack of a turn or more, where slack is 2 k - 2, the next turn goes to the
// one that would first be behind by 1 - 1 / slack. A source is behind by t * n
// / period - x, where n is turns_of_ and x its turns so far.
void Mixture::FillTurns() {
  const auto count = static_cast<int64_t>(turns_of_.size());
  const int64_t period =
      std::accumulate(turns_of_.begin(), turns_of_.end(), int64_t{0});
  const int64_t slack = std::max<int64_t>(2 * count - 2, 1);
  std::vector<int64_t> had(turns_of_.size());
  turns_.reserve(static_cast<size_t>(period));
  for (int64_t t = 1; t <= period; ++t) {
    int64_t best = -1, best_left = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t behind = t * turns_of_[i] - had[i] * period;
      if (count > 1 && behind * slack < period) continue;
      // This is the time left until it must have a turn, times slack * period /
      // n.
      const int64_t left = (slack - 1) * period - slack * behind;
      if (best >= 0 && left * turns_of_[best] >= best_left * turns_of_[i]) {
        continue;
      }
      best = i;
      best_left = left;
    }
    TESSERA_CHECK_GE(best, 0);  // all are behind by 1 together
    turns_.push_back({static_cast<int32_t>(best),
                      static_cast<int32_t>(had[static_cast<size_t>(best)]++)});
  }
}

void Mixture::FindEnd() {
  const auto period = static_cast<int64_t>(turns_.size());
  for (int64_t i = 0; i < period; ++i) {
    const Turn& turn = turns_[static_cast<size_t>(i)];
    const auto source = static_cast<size_t>(turn.source);
    const int64_t samples = options_.sources[source].num_samples;
    if (samples % turns_of_[source] != turn.earlier) continue;
    // This turn of that period would be the first of the source's second epoch.
    const absl::int128 end =
        absl::int128(samples / turns_of_[source]) * period + i;
    if (end < num_samples_) num_samples_ = static_cast<int64_t>(end);
  }
}

MixedSample Mixture::At(int64_t index) const {
  TESSERA_CHECK_GE(index, 0);
  TESSERA_CHECK_LT(index, num_samples_);
  const auto period = static_cast<int64_t>(turns_.size());
  const Turn& turn = turns_[static_cast<size_t>(index % period)];
  const auto source = static_cast<size_t>(turn.source);
  const int64_t number = index / period * turns_of_[source] + turn.earlier;
  const int64_t samples = options_.sources[source].num_samples;
  MixedSample sample;
  sample.source = turn.source;
  sample.epoch = number / samples;
  sample.index = number % samples;
  if (options_.shuffle) {
    // The key is mixed after each value, so that small numbers differ enough.
    uint64_t key = MixBits(options_.seed + kMixStep);
    key = MixBits(key ^ static_cast<uint64_t>(source) * kMixStep);
    key ^= static_cast<uint64_t>(sample.epoch) * kMixStep;
    sample.index = IndexPermutation(samples, key).At(sample.index);
  }
  return sample;
}

double Mixture::share(int source) const {
  return static_cast<double>(turns_of_[static_cast<size_t>(source)]) /
         static_cast<double>(turns_.size());
}

uint64_t Mixture::fingerprint() const {
  std::vector<int64_t> words = {static_cast<int64_t>(options_.seed),
                                options_.shuffle, num_samples_};
  for (size_t i = 0; i < turns_of_.size(); ++i) {
    words.push_back(turns_of_[i]);
    words.push_back(options_.sources[i].num_samples);
  }
  return Fingerprint(words.data(), static_cast<int64_t>(8 * words.size()));
}

}  // namespace tessera
