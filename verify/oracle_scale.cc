#include "verify/oracle_scale.h"

#include <algorithm>

#include "c10/util/Exception.h"

namespace tessera {

void OracleScale::Update(bool overflow) {
  if (!options_.dynamic) return;
  if (overflow) {
    good_steps_ = 0;
    if (options_.hysteresis != 1 && overflows_left_ != 1) {
      --overflows_left_;
      return;
    }
    TORCH_CHECK(scale_ != options_.min_scale, "the loss scale is ", scale_,
                " already, its minimum");
    scale_ = std::max(scale_ / 2, options_.min_scale);
    return;
  }
  if (options_.consecutive_hysteresis) overflows_left_ = options_.hysteresis;
  if (++good_steps_ % options_.window == 0) {
    overflows_left_ = options_.hysteresis;
    scale_ *= 2;
  }
}

}  // namespace tessera
