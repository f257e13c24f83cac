// GradientForecast: which of the allocations of a backward will be whose
// gradient, judging by the backwards before it.
//
//   the k-th allocation of so many bytes  -->  a parameter, or another's
//
// A backward runs the same operators in the same order in every step, mostly,
// so its allocations come in the same order, too. What two backwards in a row
// agree about is forecast for the next.
//
// Threads: none of its own; the caller orders the calls.
#ifndef SHARDING_GRADIENT_GRADIENT_FORECAST_H_
#define SHARDING_GRADIENT_GRADIENT_FORECAST_H_

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace tessera {

class GradientForecast {
 public:
  static constexpr int kNone = -1;

  // Only allocations of these sizes, in bytes, are followed.
  explicit GradientForecast(const absl::flat_hash_set<int64_t>& sizes);

  bool Follows(int64_t bytes) const { return sizes_.contains(bytes); }
  bool empty() const { return sizes_.empty(); }  // follows none

  void Begin();  // a backward
  // The parameter whose gradient the next allocation of `bytes` will be, or
  // kNone. REQUIRES: Follows.
  int Next(int64_t bytes);
  // That it lies at `data`.
  void Lies(int64_t bytes, const void* data);
  // The gradient of `parameter`, of `bytes`, lies at `data`.
  void Became(const void* data, int64_t bytes, int parameter);
  void End();

 private:
  struct Size {
    std::vector<int> before, last, now;  // parameters, by allocation
  };
  absl::flat_hash_map<int64_t, Size> sizes_;
  absl::flat_hash_map<const void*, std::pair<int64_t, size_t>> at_;
};

}  // namespace tessera
#endif  // SHARDING_GRADIENT_GRADIENT_FORECAST_H_
