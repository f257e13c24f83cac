// Turns on plain libtorch's autocast, for comparison with
// Engine::AutocastScope.
#ifndef VERIFY_PLAIN_PLAIN_AUTOCAST_H_
#define VERIFY_PLAIN_PLAIN_AUTOCAST_H_

#include "ATen/autocast_mode.h"

namespace tessera {

// Autocast of the CPU is on while it lives.
class PlainAutocast {
 public:
  explicit PlainAutocast(at::ScalarType dtype)
      : was_(at::autocast::is_autocast_enabled(at::kCPU)),
        was_dtype_(at::autocast::get_autocast_dtype(at::kCPU)) {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::increment_nesting();
  }
  ~PlainAutocast() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, was_);
    at::autocast::set_autocast_dtype(at::kCPU, was_dtype_);
  }

 private:
  const bool was_;
  const at::ScalarType was_dtype_;
};

}  // namespace tessera
#endif  // VERIFY_PLAIN_PLAIN_AUTOCAST_H_
