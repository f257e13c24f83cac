// Tests batches on a device: they are there when they are used, without a wait
// of the host's, and their memory stays as long as it is needed.
#include <torch/torch.h>

#include <memory>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "c10/core/StreamGuard.h"
#include "data/distributed_order.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/data_loader.h"
#include "testing/device/test_device.h"
#include "tests/support/at_start.h"

namespace tessera {
namespace {

// The device is registered before the first backward of a process.
[[maybe_unused]] const bool kRegistered =
    RunAtStart([] { testdevice::Register({}); });

using ::absl::StatusCode;
using ::testdevice::Faults;
using ::testdevice::Mode;
using ::testdevice::TestDevice;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kBatch = 4, kWidth = 33;

at::Tensor RowsOf(const std::vector<Sample>& samples) {
  std::vector<float> values;
  for (const Sample& sample : samples) {
    for (int64_t j = 0; j < kWidth; ++j) {
      values.push_back(static_cast<float>(sample.index * 100 + j));
    }
  }
  return torch::tensor(values).reshape({-1, kWidth});
}

absl::StatusOr<std::vector<at::Tensor>> Rows(absl::Span<const int64_t>,
                                             const BatchContext& context) {
  const at::Tensor rows = RowsOf({context.samples().begin(),  //
                                  context.samples().end()});
  return std::vector<at::Tensor>{rows, rows.sum(1)};
}

class LoaderDeviceTest : public ::testing::TestWithParam<Mode> {
 protected:
  static void SetUpTestSuite() { testdevice::Register({}); }
  void SetUp() override {
    testdevice::SetMode(GetParam(), 1);
    testdevice::ClearFaults();
    testdevice::ResetHostWaits();
  }
  void TearDown() override {
    EXPECT_THAT(Faults(), IsEmpty());
    testdevice::SetMode(Mode::kAtOnce);
  }
  static std::unique_ptr<DataLoader> Make(const DataLoaderOptions& options,
                                          Fetch fetch = Rows) {
    DistributedSamplerOptions sampler;
    sampler.num_samples = 22;
    auto order = DistributedOrder::Create(sampler);
    TESSERA_EXPECT_OK(order);
    auto loader =
        DataLoader::Create(*std::move(order), std::move(fetch), options);
    TESSERA_EXPECT_OK(loader);
    return *std::move(loader);
  }
  static DataLoaderOptions Options(int workers) {
    DataLoaderOptions options;
    options.batch_size = kBatch;
    options.workers = workers;
    options.prefetch = 4;
    options.device = TestDevice(1);
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Modes, LoaderDeviceTest,
                         ::testing::Values(Mode::kAtOnce, Mode::kWorkers),
                         [](const auto& info) {
                           return info.param == Mode::kAtOnce ? "AtOnce"
                                                              : "Workers";
                         });

// Steps on the current stream, each of which lets go of its batch at once.
void ExpectBatches(DataLoader* loader, int count, int64_t most_waits) {
  std::vector<at::Tensor> results, expected;
  testdevice::ResetHostWaits();
  for (int i = 0; i < count; ++i) {
    const absl::StatusOr<Batch> batch = loader->Next();
    TESSERA_ASSERT_OK(batch);
    ASSERT_EQ(batch->tensors[0].device(), TestDevice(1));
    results.push_back(batch->tensors[0] + batch->tensors[1].unsqueeze(1));
    const at::Tensor rows = RowsOf(batch->samples);
    expected.push_back(rows + rows.sum(1).unsqueeze(1));
  }
  EXPECT_LE(testdevice::CountHostWaits(), most_waits);
  for (size_t i = 0; i < results.size(); ++i) {
    EXPECT_TRUE(at::equal(results[i].cpu(), expected[i])) << i;
  }
}

TEST_P(LoaderDeviceTest, BatchesAreThereWithoutAWaitOfTheHosts) {
  for (const int workers : {0, 2}) {
    for (const int ahead : {0, 1, 3}) {
      DataLoaderOptions options = Options(workers);
      options.device_prefetch = ahead;
      ExpectBatches(Make(options).get(), 9, 0);
    }
  }
}

TEST_P(LoaderDeviceTest, WhateverTheCurrentStreamIs) {
  const c10::impl::VirtualGuardImpl impl(c10::DeviceType::PrivateUse1);
  const c10::StreamGuard guard(impl.getStreamFromGlobalPool(TestDevice(1)));
  ExpectBatches(Make(Options(2)).get(), 5, 0);
}

// Two tensors of each batch are waited for; nothing else changes.
TEST_P(LoaderDeviceTest, MemoryThatIsNotPinnedIsWaitedFor) {
  DataLoaderOptions options = Options(1);
  options.pin_memory = false;
  options.device_prefetch = 0;
  ExpectBatches(Make(options).get(), 5, 10);
  EXPECT_GT(testdevice::CountHostWaits(), 0);
}

TEST_P(LoaderDeviceTest, EndsWithCopiesUnderWay) {
  for (int taken = 0; taken < 4; ++taken) {
    auto loader = Make(Options(2));
    for (int i = 0; i < taken; ++i) TESSERA_EXPECT_OK(loader->Next());
  }
}

TEST_P(LoaderDeviceTest, GoesElsewhereWithCopiesUnderWay) {
  auto loader = Make(Options(2));
  const std::string begin = loader->State();
  for (int i = 0; i < 4; ++i) {
    TESSERA_EXPECT_OK(loader->Next());
    TESSERA_EXPECT_OK(loader->Load(begin));
  }
  ExpectBatches(loader.get(), 3, 0);
}

// A batch for which the device has no room is an error in its place; the batch
// behind it comes when there is room again.
TEST_P(LoaderDeviceTest, ADeviceThatIsFull) {
  for (const int workers : {0, 1}) {
    auto loader = Make(Options(workers));
    testdevice::SetMemoryLimit(1, 0);
    EXPECT_THAT(loader->Next(),
                StatusIs(StatusCode::kResourceExhausted,
                         HasSubstr("loader: batch 0, copy to ")));
    testdevice::SetMemoryLimit(1, INT64_MAX);
    // With workers the next may have been on its way.
    absl::StatusOr<Batch> batch = loader->Next();
    if (workers == 0) TESSERA_EXPECT_OK(batch);
    batch = loader->Next();
    TESSERA_EXPECT_OK(batch);
    EXPECT_EQ(batch->number, 2);
  }
}

// Fetch's data in the context's memory are pinned and not copied.
TEST_P(LoaderDeviceTest, MemoryOfTheContextIsPinned) {
  DataLoaderOptions options = Options(0);
  options.device = at::kCPU;
  for (const bool pins : {true, false}) {
    options.pin_memory = pins;
    const void* made = nullptr;
    auto loader = Make(
        options, [&](absl::Span<const int64_t>, const BatchContext& context) {
          const at::Tensor own = context.Empty({kBatch}, at::kFloat).fill_(1);
          made = own.const_data_ptr();
          return std::vector<at::Tensor>{own, at::ones({3})};
        });
    const absl::StatusOr<Batch> batch = loader->Next();
    TESSERA_ASSERT_OK(batch);
    EXPECT_EQ(batch->tensors[0].const_data_ptr(), made);
    EXPECT_EQ(batch->tensors[0].is_pinned(), pins);
    EXPECT_EQ(batch->tensors[1].is_pinned(), pins);
  }
}

}  // namespace
}  // namespace tessera
