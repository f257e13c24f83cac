// The average that schedule-free AdamW keeps of each group, as the oracle
// counts it: what part of it the step's z is. Of step k the weight is k^r times
// the largest rate so far to weight_lr_power, the part that over the sum of
// all.
#ifndef VERIFY_ORACLE_AVERAGE_H_
#define VERIFY_ORACLE_AVERAGE_H_

#include <cmath>
#include <map>
#include <optional>

#include "verify/oracle_step.h"

namespace tessera {

class OracleAverages {
 public:
  // In this step, which counts for the groups that are asked for.
  double Share(std::optional<size_t> group, const OracleStepOptions& o) {
    OfGroup& of = groups_[group];
    if (of.counted) return of.share;
    of.counted = true;
    of.steps += 1;
    if (o.lr > of.largest) of.largest = o.lr;
    const double weight =
        std::pow(of.steps, o.r) * std::pow(of.largest, o.weight_lr_power);
    of.total += weight;
    of.share = of.total == 0 ? 0 : weight / of.total;
    return of.share;
  }
  void EndStep() {
    for (auto& [group, of] : groups_) of.counted = false;
  }

 private:
  struct OfGroup {
    bool counted = false;
    double steps = 0, largest = 0, total = 0, share = 0;
  };
  std::map<std::optional<size_t>, OfGroup> groups_;
};

}  // namespace tessera
#endif  // VERIFY_ORACLE_AVERAGE_H_
