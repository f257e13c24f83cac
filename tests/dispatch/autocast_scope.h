// AutocastScope: what Python's torch.autocast is, for tests in C++.
#ifndef TESTS_DISPATCH_AUTOCAST_SCOPE_H_
#define TESTS_DISPATCH_AUTOCAST_SCOPE_H_

#include <ATen/autocast_mode.h>

namespace tessera {

// Autocast on or off for its life on the CPU; may be nested.
class AutocastScope {
 public:
  explicit AutocastScope(bool cache, bool on = true,
                         at::ScalarType dtype = at::kBFloat16)
      : was_on_(at::autocast::is_autocast_enabled(at::kCPU)),
        was_dtype_(at::autocast::get_autocast_dtype(at::kCPU)),
        was_cache_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, on);
    at::autocast::set_autocast_dtype(at::kCPU, dtype);
    at::autocast::set_autocast_cache_enabled(cache);
  }
  ~AutocastScope() {
    at::autocast::set_autocast_enabled(at::kCPU, was_on_);
    at::autocast::set_autocast_dtype(at::kCPU, was_dtype_);
    at::autocast::set_autocast_cache_enabled(was_cache_);
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  const bool was_on_;
  const at::ScalarType was_dtype_;
  const bool was_cache_;
};

}  // namespace tessera
#endif  // TESTS_DISPATCH_AUTOCAST_SCOPE_H_
