// The agreement of all ranks at the end of a backward: one message of each rank
// to all.
//
// Why at the end of every backward: ranks may differ in which parameters got a
// gradient, in whether they failed and (by a mistake of the program) in the
// step that they are at. Each of these decides which collectives come next and
// what is added to the step's gradients. Ranks that decided it by themselves
// would wait for each other in different collectives, or go on with different
// values and say nothing. After the message all decide from the same facts.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "comm/all_gather_values.h"
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

}  // namespace

double Gradients::unsent_weight() const {
  return running().weight.has_value()
             ? *running().weight + local_weight_
             : std::numeric_limits<double>::quiet_NaN();
}

// One message per rank: which parameters arrived or are held, the rank's
// weight, its position, a zero byte, its status as of StatusToText.
absl::Status Gradients::Agree(const absl::Status& mine,
                              std::vector<bool>* arrived,
                              std::vector<bool>* held) {
  const size_t bytes = (arrived->size() + 7) / 8;
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      AllGatherValueAndText(
          comm_.get(), unsent_weight(),
          absl::StrCat(PackBits(*arrived), PackBits(*held), running().position,
                       absl::string_view("\0", 1), StatusToText(mine)),
          CommTag{"agreement at the end of backward"}));
  std::vector<double> weights;
  std::vector<absl::string_view> positions;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const absl::string_view text = all[rank].text;
    const size_t end = text.find('\0', 2 * bytes);
    weights.push_back(all[rank].value);
    positions.push_back(text.substr(2 * bytes, end - 2 * bytes));
    const absl::Status status = StatusFromText(text.substr(end + 1));
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
    sum += weights[rank];
  }
  if (!std::isnan(sum)) total_weight_ += sum;
  return absl::OkStatus();
}

}  // namespace tessera
