// ConstructFake: makes a module whose parameters have sizes but no memory, for
// plans and traces.
#ifndef SHARDING_TRACE_CONSTRUCT_FAKE_H_
#define SHARDING_TRACE_CONSTRUCT_FAKE_H_

#include <functional>
#include <optional>
#include <type_traits>
#include <utility>

#include "absl/status/statusor.h"
#include "base/torch_guard.h"  // IWYU pragma: export

namespace tessera {

namespace trace_internal {
// Runs `construct` under a tracer.
void RunFake(const std::function<void()>& construct);
}  // namespace trace_internal

// Returns the module that `make` makes, with parameters of any size that take
// no memory: initialisers leave them alone, and small tensors have their usual
// values. Such a module can only be traced. LOCAL.
template <typename F>
absl::StatusOr<std::invoke_result_t<F>> ConstructFake(F&& make) {
  return CatchTorch("ConstructFake", [&] {
    std::optional<std::invoke_result_t<F>> made;
    trace_internal::RunFake([&] { made.emplace(make()); });
    return std::move(*made);
  });
}

}  // namespace tessera
#endif  // SHARDING_TRACE_CONSTRUCT_FAKE_H_
