// LocalAutocast does in C++ what Python's torch.autocast does.
#ifndef TESTS_DISPATCH_AUTOCAST_SCOPE_H_
#define TESTS_DISPATCH_AUTOCAST_SCOPE_H_

#include <ATen/autocast_mode.h>

namespace tessera {

// Turns autocast of the CPU on or off for its life; scopes may be nested.
class LocalAutocast {
 public:
  explicit LocalAutocast(bool cache, bool on = true,
                         at::ScalarType dtype = at::kBFloat16)
      : was_on_(at::autocast::is_autocast_enabled(at::kCPU)),
        was_dtype_(at::autocast::get_autocast_dtype(at::kCPU)),
        was_cache_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, on);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::set_autocast_cache_enabled(cache);
  }
  ~LocalAutocast() {
    at::autocast::set_autocast_enabled(at::kCPU, was_on_);
    at::autocast::set_autocast_dtype(at::kCPU, was_dtype_);
    at::autocast::set_autocast_cache_enabled(was_cache_);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  }
  LocalAutocast(const LocalAutocast&) = delete;
  LocalAutocast& operator=(const LocalAutocast&) = delete;

 private:
  const bool was_on_;
  const at::ScalarType was_dtype_;
  const bool was_cache_;
};

}  // namespace tessera
#endif  // TESTS_DISPATCH_AUTOCAST_SCOPE_H_
