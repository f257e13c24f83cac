// Do libtorch, protobuf, abseil and googletest live together in one binary?
// libtorch brings a protobuf of its own, which must not be mistaken for ours.
#include <torch/torch.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "third_party/libtorch/smoke.pb.h"

namespace tessera {
namespace {

TEST(SmokeTest, GradientOfSquaredSum) {
  torch::Tensor x = torch::arange(4, torch::kFloat).requires_grad_(true);
  (x * x).sum().backward();
  EXPECT_TRUE(torch::equal(x.grad(), 2 * x.detach()));
}

TEST(SmokeTest, ShapeThroughProtobuf) {
  torch::Tensor x = torch::zeros({2, 3, 5});
  smoke::Shape shape;
  for (int64_t dim : x.sizes()) shape.add_dims(dim);
  std::string bytes;
  ASSERT_TRUE(shape.SerializeToString(&bytes));
  smoke::Shape read;
  ASSERT_TRUE(read.ParseFromString(bytes));
  EXPECT_EQ(read.dims_size(), 3);
  EXPECT_EQ(read.dims(2), 5);
}

TEST(SmokeTest, StatusWithTorchError) {
  absl::Status status;
  try {
    torch::ones({2, 3}).matmul(torch::ones({2, 3}));
  } catch (const c10::Error& error) {
    status = absl::InvalidArgumentError(
        absl::StrFormat("torch: %s", error.what_without_backtrace()));
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace tessera
