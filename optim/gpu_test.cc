// What block sums of gradients on a GPU are.
#include <torch/torch.h>

#include <limits>

#include "gtest/gtest.h"
#include "optim/block_powers.h"
#include "optim/grad_norm.h"

namespace tessera {
namespace {

class OptimGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!torch::cuda::is_available()) GTEST_SKIP() << "no GPU";
    torch::manual_seed(1);
  }
};

TEST_F(OptimGpu, BlockPowersAreTheCpus) {
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const at::Tensor x = torch::randn({100003}).to(dtype);
    for (const double p :
         {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      const at::Tensor blocks =
          BlockPowersByOperators(x.to(at::kCUDA), 5, p).cpu().contiguous();
      const double* const data = blocks.const_data_ptr<double>();
      EXPECT_EQ(std::vector<double>(data, data + blocks.numel()),
                BlockPowers(x, 5, p))
          << dtype << ", p " << p;
    }
  }
}

TEST_F(OptimGpu, NormIsTheCpus) {
  const at::Tensor x = torch::randn({(1 << 22) + 77});
  const at::Tensor z = torch::randn({1000}, at::kComplexFloat);
  NormSum cpu(2), gpu(2);
  cpu.Add(x, 9);
  cpu.Add(z, 0);
  gpu.Add(x.to(at::kCUDA), 9);
  gpu.Add(z.to(at::kCUDA), 0);
  gpu.Finish();
  EXPECT_EQ(gpu.Serialize(), cpu.Serialize());
}

}  // namespace
}  // namespace tessera
