// Computes the loss scale for the oracle, by DeepSpeed's rules
// (DynamicLossScaler).
#ifndef VERIFY_ORACLE_SCALE_H_
#define VERIFY_ORACLE_SCALE_H_

#include <cstdint>

namespace tessera {

struct LossScaling {
  double scale = 65536;  // the first, or the only one
  bool dynamic = true;
  // The scale doubles after this many steps without overflow since the last
  // overflow, doubling or the start.
  int64_t window = 1000;
  // The scale halves from the n-th overflow on that follows the start or a
  // doubling. 0: never.
  int64_t hysteresis = 2;
  // Whether every step without an overflow restarts the count of overflows.
  bool consecutive_hysteresis = false;
  double min_scale = 1;
};

class OracleScale {
 public:
  explicit OracleScale(const LossScaling& options)
      : options_(options),
        scale_(options.scale),
        overflows_left_(options.hysteresis) {}

  double scale() const { return scale_; }
  // Call it after each step. Throws c10::Error where DeepSpeed raises: an
  // overflow that would halve the smallest scale.
  void Update(bool overflow);

 private:
  const LossScaling options_;
  double scale_;
  int64_t overflows_left_;  // 1: the next one halves
  int64_t good_steps_ = 0;  // since the last overflow
};

}  // namespace tessera
#endif  // VERIFY_ORACLE_SCALE_H_
