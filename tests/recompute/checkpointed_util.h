// What the tests of checkpointed regions share: a loss computed plainly and
// through a region, compared to the bit, and which operators run.
#ifndef TESTS_RECOMPUTE_CHECKPOINTED_UTIL_H_
#define TESTS_RECOMPUTE_CHECKPOINTED_UTIL_H_

#include <ATen/record_function.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "sharding/recompute/checkpointed/checkpointed.h"
#include "tests/dispatch/tagged_storage_util.h"

namespace tessera {

using at::Tensor;

// Counts this thread's operators by name, for its life.
class OperatorCounts {
 public:
  OperatorCounts() {
    counts().clear();
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& fn)
                                       -> std::unique_ptr<at::ObserverContext> {
          ++counts()[fn.name()];
          return nullptr;
        }).scopes({at::RecordScope::FUNCTION}));
  }
  ~OperatorCounts() { at::removeCallback(handle_); }
  int of(const std::string& name) const {
    auto it = counts().find(name);
    return it == counts().end() ? 0 : it->second;
  }

 private:
  static std::map<std::string, int>& counts() {
    thread_local std::map<std::string, int> counts;
    return counts;
  }
  at::CallbackHandle handle_;
};

// How a function is called: plainly, or as a region.
using Unary = std::function<Tensor(const Tensor&)>;
using Caller = std::function<Tensor(const Unary&, const Tensor&)>;
inline Tensor Plainly(const Unary& f, const Tensor& x) { return f(x); }
inline Tensor AsRegion(const Unary& f, const Tensor& x) {
  return Checkpointed(f, x);
}

// What a run gives: all compared to the bit.
using Values = std::vector<Tensor>;
inline void ExpectSame(const Values& expected, const Values& got) {
  ASSERT_EQ(expected.size(), got.size());
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(SameBits(expected[i], got[i])) << "value " << i;
  }
}

// The error of `f`; "" if it throws nothing.
inline std::string ErrorOf(const std::function<void()>& f) {
  const absl::Status status = CatchTorch("test", f);
  return std::string(status.message());
}

}  // namespace tessera
#endif  // TESTS_RECOMPUTE_CHECKPOINTED_UTIL_H_
