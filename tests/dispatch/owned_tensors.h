// For tests of tagged storage below the engine: makes tensors that units own,
// and compares a function of them bit by bit with plain libtorch.
#ifndef TESTS_DISPATCH_OWNED_TENSORS_H_
#define TESTS_DISPATCH_OWNED_TENSORS_H_

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "sharding/dispatch/saved_tensors.h"
#include "sharding/flat/schedule.h"
#include "tests/dispatch/tagged_storage_util.h"

namespace tessera {

using Tensors = std::vector<at::Tensor>;
// A function of parameters and inputs.
using Function = std::function<at::Tensor(const Tensors& w, const Tensors& x)>;

// Owns tensors for its life, each in a unit of its own that is freed whenever
// no operator uses it.
class Owner {
 public:
  explicit Owner(const Tensors& tensors, bool cast_inputs = true) {
    InstallSavedTensorHooks();
    for (const at::Tensor& t : tensors) {
      FlatParameterOptions options;
      options.stage = Stage::Of(3);
      options.cast_inputs = cast_inputs;
      auto unit =
          FlatParameter::Prepare("unit", {{"p", t}}, options, comm_, schedule_);
      TESSERA_EXPECT_OK(unit);
      TESSERA_EXPECT_OK(unit.value()->Adopt());
      flats_.push_back(*std::move(unit));
    }
  }
  ~Owner() {
    ReleaseNodePins();
    for (const auto& unit : flats_) {
      EXPECT_EQ(unit->pins(), 0);
      TESSERA_EXPECT_OK(unit->Release());
    }
  }
  Owner(const Owner&) = delete;
  Owner& operator=(const Owner&) = delete;

 private:
  std::shared_ptr<SpyCommunicator> comm_ = std::make_shared<SpyCommunicator>();
  std::shared_ptr<Schedule> schedule_ = [] {
    ScheduleOptions options;
    options.max_live = 0;
    return std::make_shared<Schedule>(options);
  }();
  std::vector<std::shared_ptr<FlatParameter>> flats_;
};

inline Tensors Copies(const Tensors& tensors) {
  Tensors copies;
  for (const at::Tensor& t : tensors) {
    copies.push_back(t.detach().clone().set_requires_grad(t.requires_grad()));
  }
  return copies;
}

inline Tensors Random(const std::vector<std::vector<int64_t>>& sizes,
                      at::ScalarType dtype) {
  Tensors tensors;
  for (const auto& s : sizes) {
    tensors.push_back(torch::randn(s).to(dtype).requires_grad_());
  }
  return tensors;
}

inline Tensors To(at::ScalarType dtype, Tensors tensors) {
  for (at::Tensor& t : tensors) t = t.to(dtype);
  return tensors;
}

// Returns the result, and the gradients of all arguments.
inline Tensors ResultAndGradients(const Function& f, const Tensors& w,
                                  const Tensors& x) {
  const at::Tensor y = f(w, x);
  y.to(at::kFloat).pow(2).sum().backward();
  Tensors all = {y};
  for (const Tensors* leaves : {&w, &x}) {
    for (const at::Tensor& t : *leaves) all.push_back(t.grad());
  }
  return all;
}

// Expects that `tagged` gives with owned parameters what `by_hand` gives with
// plain ones.
inline void ExpectSame(const Function& by_hand, const Function& tagged,
                       const Tensors& w, const Tensors& x) {
  Tensors expected, got;
  {
    PlainAutograd plain;
    expected = ResultAndGradients(by_hand, Copies(w), Copies(x));
  }
  const Tensors owned = Copies(w);
  {
    Owner owner(owned);
    got = ResultAndGradients(tagged, owned, Copies(x));
  }
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(SameBits(expected[i], got[i]))
        << (i == 0 ? "result" : "gradient of argument ") << i;
  }
}

// An operator, and the sizes of its parameters and inputs.
struct OperatorCase {
  std::string name;
  std::vector<std::vector<int64_t>> parameters, inputs;
  Function f;
};
inline void PrintTo(const OperatorCase& c, std::ostream* out) {
  *out << c.name;
}
inline std::string CaseNameOf(
    const ::testing::TestParamInfo<OperatorCase>& info) {
  return info.param.name;
}

// Makes a Function of w and x.
#define TESSERA_OF_W_X(...)                              \
  [](const Tensors& w, const Tensors& x) -> at::Tensor { \
    return ::tessera::FirstOf(__VA_ARGS__);              \
  }
inline at::Tensor FirstOf(const at::Tensor& t) { return t; }
template <typename... T>
at::Tensor FirstOf(const std::tuple<at::Tensor, T...>& results) {
  return std::get<0>(results);
}

}  // namespace tessera
#endif  // TESTS_DISPATCH_OWNED_TENSORS_H_
