// The agreement of all ranks at the end of a backward: one message of each rank
// to all.
//
// Why at the end of every backward: ranks may differ in which parameters got a
// gradient, in whether they failed and (by a mistake of the program) in the
// step that they are at. Each of these decides which collectives come next and
// what is added to the step's gradients. Ranks that decided it by themselves
// would wait for each other in different collectives, or go on with different
// values and say nothing. After the message all decide from the same facts.
//
// And what weights are measured in. A weight multiplies the whole backward, and
// the sum of all weights divides the gradient at last: a weight of 4096 samples
// would overflow float16 at once, though all that it is to say is that the
// other ranks have as many. So weights are divided by a unit before the
// backward, the same on all ranks, which cancels out: a power of two of about
// the largest, so that no bit of a sum changes; or, where one Backward makes a
// step and all weights are equal, that weight, so that the step is to the bit
// one without weights. It is found anew for each step, from the weights of the
// first micro-batch that has any, so that a run that goes on from a checkpoint
// has the same one. Other dtypes than float16 have the range of float32: there
// weights count as they are, and no message is needed.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "comm/all_gather_values.h"
#include "sharding/flat/placed_writes.h"
#include "sharding/gradient/gradients.h"

namespace tessera {
namespace {

std::string PackBits(const std::vector<bool>& bits) {
  std::string bytes((bits.size() + 7) / 8, '\0');
  for (size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) bytes[i / 8] |= static_cast<char>(1 << (i % 8));
  }
  return bytes;
}

void OrBits(absl::string_view bytes, std::vector<bool>* bits) {
  for (size_t i = 0; i < bits->size(); ++i) {
    if (bytes[i / 8] & (1 << (i % 8))) (*bits)[i] = true;
  }
}

constexpr absl::string_view kEnd("\0", 1);

// The least k with 2^k >= x. REQUIRES: x > 0, finite.
int CeilLog2(double x) {
  int power = 0;
  const double part = std::frexp(x, &power);  // [0.5, 1)
  return part == 0.5 ? power - 1 : power;
}

}  // namespace

absl::Status Gradients::ChooseWeightUnit(const absl::Status& mine,
                                         std::optional<double> weight) {
  if (measure_.chosen) return mine;
  const double own = mine.ok() && weight.has_value()
                         ? *weight
                         : std::numeric_limits<double>::quiet_NaN();
  if (comm_->world_size() == 1) {
    if (mine.ok()) Measure({own});
    return mine;
  }
  // The choice is identical on all ranks, whatever this one was given, and
  // holds for the whole step, whose parts must have one unit.
  measure_.chosen = !half_ || weights_ == Weights::kNone;
  if (measure_.chosen) return mine;
  // The others may be in a gather: Run announces what was wrong.
  if (!mine.ok() && AnyGathersTogether()) return mine;
  const auto all = AllGatherValue<double>(
      comm_.get(), own, CommTag{"weights of the first micro-batch of a step"});
  if (!all.ok()) return mine.ok() ? all.status() : mine;
  Measure(*all);
  return mine;
}

// Chooses the unit from the weights of all ranks; NaN: none was given.
void Gradients::Measure(const std::vector<double>& weights) {
  double largest = 0;
  bool any = false, equal = options_.accumulation == 1;
  for (const double weight : weights) {
    any = any || !std::isnan(weight);
    equal = equal && weight == weights[0];
    if (weight > largest) largest = weight;
  }
  // Where all are 0 so far nothing counts yet, in no unit.
  measure_.chosen = largest > 0 || !any;
  if (largest == 0) return;
  if (equal) {
    measure_.unit = largest;
    measure_.sum_divisor = data_ranks();
    return;
  }
  // As without weights a backward has no more than 1 / accumulation, and a mean
  // no more than the largest of what it is of.
  const int power =
      CeilLog2(largest) + CeilLog2(static_cast<double>(options_.accumulation));
  measure_.unit = std::ldexp(1, std::min(power, 1023));
  measure_.sum_divisor = std::ldexp(1, CeilLog2(data_ranks()));
}

MeanOptions Gradients::mean() const {
  double base = 1;
  if (options_.mean) {
    base = running().weight.has_value() ? measure_.sum_divisor : data_ranks();
  }
  return {options_.predivide, base / options_.predivide};
}

double Gradients::weight_divisor() const {
  return total_weight_ /
         (options_.mean ? measure_.sum_divisor : data_ranks());
}

std::string Gradients::TakePlacedWrites() const {
  std::string writes;
  for (const auto& flat : flats_) writes += flat->flat().TakePlacedWrites();
  return writes;
}

double Gradients::unsent_weight() const {
  if (!running().weight.has_value()) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return local_weight_ + (running().another_loss ? 0 : *running().weight);
}

// One message per rank: which parameters arrived or are held, whether gradients
// were used up, the rank's weight, its position, a zero byte, what operators
// wrote at places that depend on their input (sharding/flat/placed_writes.h), a
// zero byte, its status as of StatusToText.
absl::Status Gradients::Agree(const absl::Status& mine,
                              std::vector<bool>* arrived,
                              std::vector<bool>* held) {
  const size_t bytes = (arrived->size() + 7) / 8;
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      AllGatherValueAndText(
          comm_.get(), unsent_weight(),
          absl::StrCat(PackBits(*arrived), PackBits(*held), UsedUp() ? 1 : 0,
                       running().position, kEnd, TakePlacedWrites(), kEnd,
                       StatusToText(mine)),
          CommTag{"agreement at the end of backward"}));
  any_used_up_ = std::any_of(all.begin(), all.end(), [&](const auto& each) {
    return each.text[2 * bytes] == '1';
  });
  std::vector<double> weights;
  std::vector<absl::string_view> positions, writes;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const absl::string_view text = all[rank].text;
    const size_t begin = 2 * bytes + 1;
    const size_t end = text.find('\0', begin);
    const size_t end_of_writes = text.find('\0', end + 1);
    weights.push_back(all[rank].value);
    positions.push_back(text.substr(begin, end - begin));
    writes.push_back(text.substr(end + 1, end_of_writes - end - 1));
    const absl::Status status = StatusFromText(text.substr(end_of_writes + 1));
    if (!status.ok()) {
      return static_cast<int>(rank) == comm_->rank()
                 ? mine
                 : Annotate(status, absl::StrCat("rank ", rank, " failed"));
    }
    OrBits(text, arrived);
    OrBits(text.substr(bytes), held);
  }
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (positions[rank] == positions[0]) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "Backward: rank ", rank, " is at ", positions[rank], ", rank 0 at ",
        positions[0], "; all ranks must call the same Step and ZeroGrad"));
  }
  TESSERA_RETURN_IF_ERROR(ComparePlacedWrites(writes, "Backward"));
  return AddWeights(weights);
}

// In rank order, so that all ranks come to the same bits.
absl::Status Gradients::AddWeights(const std::vector<double>& weights) {
  double sum = 0;
  for (size_t rank = 0; rank < weights.size(); ++rank) {
    if (std::isnan(weights[rank]) != std::isnan(weights[0])) {
      return absl::FailedPreconditionError(absl::StrCat(
          "Backward: rank ", std::isnan(weights[0]) ? rank : 0,
          " gave a weight and rank ", std::isnan(weights[0]) ? 0 : rank,
          " gave none; all ranks must do the same"));
    }
    if (rank % static_cast<size_t>(options_.ranks_of_sample) == 0) {
      sum += weights[rank];
    }
  }
  if (!std::isnan(sum)) {
    weights_ = Weights::kGiven;
    total_weight_ += sum;
  } else if (weights_ == Weights::kUnknown) {
    weights_ = Weights::kNone;
  }
  return absl::OkStatus();
}

}  // namespace tessera
