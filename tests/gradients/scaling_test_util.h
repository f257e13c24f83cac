// What the tests of scaled gradients share: a model whose gradients are given,
// and the suite, whose parameter is the stage.
#ifndef TESTS_GRADIENTS_SCALING_TEST_UTIL_H_
#define TESTS_GRADIENTS_SCALING_TEST_UTIL_H_

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <iterator>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"

namespace tessera {

inline constexpr int64_t kSizes[] = {5, 3};  // of the parameters

// Two parameters, of a unit each, that begin as zeros.
class Places : public TestModel {
 public:
  Places() {
    for (size_t i = 0; i < std::size(kSizes); ++i) {
      auto unit = std::make_shared<torch::nn::Module>();
      w.push_back(unit->register_parameter("w", torch::zeros({kSizes[i]})));
      register_module(absl::StrCat("unit", i), unit);
    }
  }
  at::Tensor Loss(int, int64_t) override { return {}; }
  // Returns a loss whose gradient for element e is `gradient(e)`.
  at::Tensor LossOf(const std::function<double(int64_t)>& gradient) {
    at::Tensor loss = torch::zeros({});
    int64_t e = 0;
    for (const at::Tensor& p : w) {
      std::vector<float> factors;
      for (int64_t i = 0; i < p.numel(); ++i) {
        factors.push_back(static_cast<float>(gradient(e++)));
      }
      loss = loss + (p.to(torch::kFloat) * torch::tensor(factors)).sum();
    }
    return loss;
  }
  std::vector<at::Tensor> w;
};

class ScalingTest : public ::testing::TestWithParam<int> {};

}  // namespace tessera
#endif  // TESTS_GRADIENTS_SCALING_TEST_UTIL_H_
