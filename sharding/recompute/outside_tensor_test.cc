// What is written to while its old values are on their way elsewhere. The rest
// of it: //tests/recompute, tests/offload/activations_test.cc.
#include "sharding/recompute/outside_tensor.h"

#include <torch/torch.h>

#include <memory>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status_matchers.h"
#include "gtest/gtest.h"
#include "offload/activation_store.h"
#include "offload/disk/swap_test_util.h"

namespace tessera {
namespace {

// Long enough for a writer that does not wait to be there first; one that does
// is right whatever it is.
class SlowSystem final : public TestSystem {
 public:
  SlowSystem() : TestSystem(/*uring=*/false) {}
  int64_t PWrite(int of, const char* from, int64_t bytes,
                 int64_t offset) override {
    absl::SleepFor(absl::Milliseconds(50));
    return TestSystem::PWrite(of, from, bytes, offset);
  }
};

TEST(OutsideTensorTest, IsWhatItWasWhoeverWritesMeanwhile) {
  const Folder folder;
  SlowSystem system;
  SwapOptions options;
  options.folder = folder.path();
  options.owner = "rank 0";
  TESSERA_ASSERT_OK_AND_ASSIGN(const std::shared_ptr<SwapFile> file,
                               SwapFile::Create(options, &system));
  const auto store = ActivationStore::Create(file, /*least_bytes=*/1);
  const at::Tensor x =
      torch::ones({2 * OutsideTensors::kCopiedBytes / 4}, torch::kFloat);
  OutsideTensors outside;
  const auto held = outside.Of(x);
  ActivationStore::Group group = store->NewGroup();
  held->MoveTo(&group, "x");
  outside.BeforeWrite(x);
  x.fill_(2);
  const TensorPlace place(x);
  PinSet pins;
  EXPECT_TRUE(at::equal(held->Value(&place, "a reader", &pins),
                        torch::ones_like(x)));
  EXPECT_EQ(store->stats().bytes_back, static_cast<int64_t>(x.nbytes()));
}

}  // namespace
}  // namespace tessera
