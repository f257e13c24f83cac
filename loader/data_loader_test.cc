#include "loader/data_loader.h"

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "ATen/ops/tensor.h"
#include "absl/synchronization/notification.h"
#include "gmock/gmock.h"
#include "loader/loader_test_util.h"

namespace tessera {
namespace {

using ::absl::StatusCode;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(DataLoaderTest, TensorsAreOfTheBatchsSamples) {
  for (const int workers : {0, 1, 3}) {
    auto loader = MakeLoader(OrderOf(10), Indices, LoaderOptions(4, workers));
    auto order = DistributedSampler::Create(OrderOf(10));
    for (int i = 0; i < 6; ++i) {
      const absl::StatusOr<Batch> batch = loader->Next();
      TESSERA_ASSERT_OK(batch);
      const std::vector<int64_t> expected = order->NextBatch(4);
      EXPECT_EQ(IndicesOf(*batch), expected);
      EXPECT_TRUE(at::equal(batch->tensors[0], at::tensor(expected)));
      EXPECT_EQ(batch->number, i);
      EXPECT_EQ(batch->bytes, 32);
      EXPECT_EQ(batch->ends_epoch, i == 2 || i == 4) << i;
    }
  }
}

// Batch 0 is done after batch 1, and still comes first.
TEST(DataLoaderTest, TheOrderIsTheSamplersWhoeverIsDoneFirst) {
  DistributedSamplerOptions order = OrderOf(100);
  order.shuffle = false;
  absl::Notification second;
  auto loader = MakeLoader(
      order,
      [&](absl::Span<const int64_t> indices, const BatchContext& context) {
        if (indices[0] == 0) second.WaitForNotification();
        if (indices[0] == 2) second.Notify();
        return Indices(indices, context);
      },
      LoaderOptions(2, 2));
  EXPECT_THAT(IndicesOf(*loader->Next()), ElementsAre(0, 1));
  EXPECT_THAT(IndicesOf(*loader->Next()), ElementsAre(2, 3));
}

TEST(DataLoaderTest, ShortAndDroppedEnds) {
  for (const int workers : {0, 2}) {
    DataLoaderOptions options = LoaderOptions(4, workers);
    options.epoch_end = EpochEnd::kShort;
    auto loader = MakeLoader(OrderOf(10), Indices, options);
    for (const size_t size : {4u, 4u, 2u, 4u}) {
      const absl::StatusOr<Batch> batch = loader->Next();
      EXPECT_EQ(batch->samples.size(), size);
      EXPECT_EQ(batch->ends_epoch, size == 2);
    }
    EXPECT_EQ(loader->epoch(), 1);
    options.epoch_end = EpochEnd::kDrop;
    loader = MakeLoader(OrderOf(10), Indices, options);
    for (const bool ends : {false, true, false, true}) {
      const absl::StatusOr<Batch> batch = loader->Next();
      EXPECT_EQ(batch->samples.size(), 4u);
      EXPECT_EQ(batch->ends_epoch, ends);
    }
    EXPECT_EQ(loader->epoch(), 2);
    loader = MakeLoader(OrderOf(3), Indices, options);
    for (int i = 0; i < 2; ++i) {
      EXPECT_THAT(loader->Next(),
                  StatusIs(StatusCode::kFailedPrecondition,
                           HasSubstr("has 3 samples for this rank, no batch "
                                     "of 4")));
    }
  }
}

// Augmentation gives a sample the same bits in any batch, worker and rank.
TEST(DataLoaderTest, RandomNumbersAreTheSamples) {
  const auto fetch = [](absl::Span<const int64_t> indices,
                        const BatchContext& context) -> Tensors {
    std::vector<double> numbers;
    for (size_t i = 0; i < indices.size(); ++i) {
      numbers.push_back(context.Random(static_cast<int64_t>(i)).Uniform());
    }
    return std::vector<at::Tensor>{at::tensor(numbers, at::kDouble)};
  };
  std::map<std::pair<int64_t, int64_t>, double> of_sample;
  const auto train = [&](int world_size, int workers, int64_t batch_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      auto loader = MakeLoader(OrderOf(12, rank, world_size), fetch,
                               LoaderOptions(batch_size, workers));
      while (loader->epoch() < 2) {
        const absl::StatusOr<Batch> batch = loader->Next();
        TESSERA_ASSERT_OK(batch);
        for (size_t i = 0; i < batch->samples.size(); ++i) {
          const Sample& sample = batch->samples[i];
          const double value = batch->tensors[0].const_data_ptr<double>()[i];
          const auto at = of_sample.emplace(
              std::make_pair(sample.epoch, sample.index), value);
          ASSERT_EQ(at.first->second, value);
        }
      }
    }
  };
  train(1, 0, 12);
  std::set<double> values;
  for (const auto& [sample, value] : of_sample) values.insert(value);
  EXPECT_EQ(values.size(), 24u);  // each epoch has others
  train(1, 3, 5);
  train(2, 1, 3);
  train(3, 2, 4);
}

TEST(DataLoaderTest, TheStateIsOfWhatWasDelivered) {
  Counter fetched;
  const auto fetch = [&](absl::Span<const int64_t> indices,
                         const BatchContext& context) {
    fetched.Add(1);
    return Indices(indices, context);
  };
  auto loader = MakeLoader(OrderOf(40), fetch, LoaderOptions(4, 2, 5));
  auto plain = MakeLoader(OrderOf(40), Indices, LoaderOptions(4, 0));
  for (int i = 0; i < 12; ++i) {
    fetched.WaitFor(i + 5);  // as far ahead as may be
    EXPECT_EQ(loader->State(), plain->State());
    EXPECT_EQ(loader->epoch(), plain->epoch());
    EXPECT_EQ(IndicesOf(*loader->Next()), IndicesOf(*plain->Next()));
  }
  EXPECT_EQ(loader->State(),
            "tessera-loader 1 seed=0 epoch=1 position=8 samples=40 seed=9 "
            "shuffle=1");
}

TEST(DataLoaderTest, GoesBackAndForthWithBatchesAhead) {
  for (const int workers : {0, 1, 3}) {
    auto loader = MakeLoader(OrderOf(23), Indices, LoaderOptions(4, workers));
    std::vector<std::string> states;
    std::vector<std::vector<int64_t>> batches;
    for (int i = 0; i < 9; ++i) {
      states.push_back(loader->State());
      batches.push_back(IndicesOf(*loader->Next()));
    }
    for (const size_t at : {5u, 0u, 8u, 3u, 3u}) {
      TESSERA_ASSERT_OK(loader->Load(states[at]));
      EXPECT_EQ(loader->State(), states[at]);
      for (size_t i = at; i < batches.size() && i < at + 2; ++i) {
        const absl::StatusOr<Batch> batch = loader->Next();
        EXPECT_EQ(IndicesOf(*batch), batches[i]);
        EXPECT_EQ(batch->number, static_cast<int64_t>(i - at));
      }
    }
    TESSERA_ASSERT_OK(loader->SetEpoch(0));
    EXPECT_EQ(IndicesOf(*loader->Next()), batches[0]);
    TESSERA_ASSERT_OK(loader->SetEpoch(7));
    EXPECT_EQ(loader->epoch(), 7);
    EXPECT_EQ(loader->Next()->samples[0].epoch, 7);
  }
}

TEST(DataLoaderTest, AStateThatDoesNotFitChangesNothing) {
  for (const int workers : {0, 2}) {
    auto loader = MakeLoader(OrderOf(12), Indices, LoaderOptions(4, workers));
    auto plain = MakeLoader(OrderOf(12), Indices, LoaderOptions(4, 0));
    EXPECT_EQ(IndicesOf(*loader->Next()), IndicesOf(*plain->Next()));
    const std::string head = "tessera-loader 1 seed=0 ";
    for (const std::string& text :
         {std::string(), std::string("3 5 2000 7"),
          std::string("tessera-loader 1 seed=x "), head,
          head + "epoch=0 position=-4 samples=12 seed=9 shuffle=1",
          head + "epoch=0 position=12 samples=12 seed=9 shuffle=1",
          head + "epoch=0 samples=12 seed=9 shuffle=1"}) {
      EXPECT_THAT(loader->Load(text),
                  StatusIs(StatusCode::kDataLoss, HasSubstr("got '")))
          << text;
    }
    EXPECT_THAT(
        loader->Load("tessera-loader 1 seed=5 epoch=0 position=4 samples=12 "
                     "seed=9 shuffle=1"),
        StatusIs(StatusCode::kFailedPrecondition,
                 HasSubstr("saved with seed 5, but here it is 0")));
    EXPECT_THAT(
        loader->Load(head + "epoch=0 position=4 samples=13 seed=9 shuffle=1"),
        StatusIs(StatusCode::kFailedPrecondition,
                 HasSubstr("saved with samples=13 seed=9 shuffle=1, but here "
                           "it is samples=12 seed=9 shuffle=1; is it other "
                           "data?")));
    EXPECT_THAT(loader->SetEpoch(-1), StatusIs(StatusCode::kInvalidArgument));
    EXPECT_EQ(loader->State(), plain->State());
    EXPECT_EQ(IndicesOf(*loader->Next()), IndicesOf(*plain->Next()));
  }
}

// Memory of batches that are gone is that of the next, and of no batch that is
// still there.
TEST(DataLoaderTest, MemoryIsUsedAgain) {
  for (const int workers : {0, 2}) {
    const auto fetch = [](absl::Span<const int64_t> indices,
                          const BatchContext& context) -> Tensors {
      at::Tensor own = context.Empty({5, 100}, at::kFloat);
      own.fill_(static_cast<double>(indices[0]));
      return std::vector<at::Tensor>{own};
    };
    DistributedSamplerOptions order = OrderOf(1000);
    order.shuffle = false;
    auto loader = MakeLoader(order, fetch, LoaderOptions(1, workers, 3));
    std::set<const void*> places;
    std::vector<Batch> held;
    for (int i = 0; i < 100; ++i) {
      held.push_back(*loader->Next());
      places.insert(held.back().tensors[0].const_data_ptr());
      if (held.size() < 3) continue;
      const Batch& oldest = held.front();
      EXPECT_TRUE(at::equal(
          oldest.tensors[0],
          at::full({5, 100}, static_cast<double>(oldest.samples[0].index))));
      held.erase(held.begin());
    }
    // The queue's 3, one that each worker may have begun, 3 that are held.
    EXPECT_LE(places.size(), 3u + 2u + 3u);
    loader.reset();
    EXPECT_EQ(held[0].tensors[0][4][99].item<float>(), 98);
  }
}

// ---- Errors, in the place of their batch.

enum class How { kStatus, kException, kTorch };

Fetch FailsAt(int64_t index, How how) {
  return [index, how](absl::Span<const int64_t> indices,
                      const BatchContext& context) -> Tensors {
    if (std::find(indices.begin(), indices.end(), index) != indices.end()) {
      if (how == How::kStatus) return absl::DataLossError("page 7 is damaged");
      if (how == How::kException) throw std::runtime_error("no such picture");
      at::tensor({1, 2}).view({3});
    }
    return Indices(indices, context);
  };
}

TEST(DataLoaderTest, AnErrorComesInThePlaceOfItsBatch) {
  DistributedSamplerOptions order = OrderOf(12);
  order.shuffle = false;
  for (const int workers : {0, 1, 3}) {
    for (const How how : {How::kStatus, How::kException, How::kTorch}) {
      auto loader =
          MakeLoader(order, FailsAt(5, how), LoaderOptions(2, workers));
      EXPECT_THAT(IndicesOf(*loader->Next()), ElementsAre(0, 1));
      EXPECT_THAT(IndicesOf(*loader->Next()), ElementsAre(2, 3));
      const std::string before = loader->State();
      const absl::Status error = loader->Next().status();
      EXPECT_THAT(std::string(error.message()),
                  HasSubstr("loader: batch 2 (2 samples of epoch 0: 4, 5): "));
      switch (how) {
        case How::kStatus:
          EXPECT_THAT(error, StatusIs(StatusCode::kDataLoss,
                                      HasSubstr("): page 7 is damaged")));
          break;
        case How::kException:
          EXPECT_THAT(error, StatusIs(StatusCode::kInternal,
                                      HasSubstr("fetch: no such picture")));
          break;
        case How::kTorch:
          EXPECT_THAT(error, StatusIs(StatusCode::kInternal,
                                      HasSubstr("shape '[3]' is invalid")));
      }
      // The batch was not delivered, so a checkpoint would have it again.
      EXPECT_EQ(loader->State(), before);
      EXPECT_THAT(IndicesOf(*loader->Next()), ElementsAre(6, 7));
      EXPECT_NE(loader->State(), before);
      TESSERA_ASSERT_OK(loader->Load(before));
      EXPECT_EQ(loader->Next().status().code(), error.code());
      EXPECT_EQ(loader->stats().errors, 2);
      EXPECT_EQ(loader->stats().batches, 3);
    }
  }
}

TEST(DataLoaderTest, ManySamplesAreNamedByTheFirst) {
  DistributedSamplerOptions order = OrderOf(12);
  order.shuffle = false;
  auto loader =
      MakeLoader(order, FailsAt(5, How::kStatus), LoaderOptions(20, 1));
  EXPECT_THAT(loader->Next(),
              StatusIs(StatusCode::kDataLoss,
                       HasSubstr("batch 0 (20 samples of epoch 0 to 1: 0, 1, "
                                 "2, 3, 4, 5, 6, 7, ...): page")));
}

TEST(DataLoaderTest, OptionsThatCannotBe) {
  const auto refused = [](DataLoaderOptions options) {
    return DataLoader::Create(*DistributedOrder::Create(OrderOf(4)), Indices,
                              options)
        .status();
  };
  EXPECT_THAT(refused(LoaderOptions(0, 0)),
              StatusIs(StatusCode::kInvalidArgument,
                       HasSubstr("batch_size: expected 1 or more, got 0")));
  EXPECT_THAT(refused(LoaderOptions(1, -1)),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("workers")));
  EXPECT_THAT(refused(LoaderOptions(1, 1, -1)),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("prefetch")));
  DataLoaderOptions options;
  options.prefetch_bytes = -1;
  EXPECT_THAT(refused(options), StatusIs(StatusCode::kInvalidArgument,
                                         HasSubstr("prefetch_bytes")));
  EXPECT_THAT(DataLoader::Create(nullptr, Indices, {}),
              StatusIs(StatusCode::kInvalidArgument, HasSubstr("an order")));
  EXPECT_THAT(
      DataLoader::Create(*DistributedOrder::Create(OrderOf(4)), nullptr, {}),
      StatusIs(StatusCode::kInvalidArgument, HasSubstr("a Fetch")));
}

}  // namespace
}  // namespace tessera
