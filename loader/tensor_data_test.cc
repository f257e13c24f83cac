#include "loader/tensor_data.h"

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/status_matchers.h"
#include "base/torch_guard.h"
#include "comm/fake_communicator_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "loader/loader_test_util.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Rows i of [N, 2] are 10 i and 10 i + 1, labels are i.
std::vector<at::Tensor> Numbers(int64_t samples) {
  const at::Tensor labels = torch::arange(samples, torch::kLong);
  const at::Tensor tens = 10 * labels.to(torch::kFloat).unsqueeze(1);
  return {torch::cat({tens, tens + 1}, 1), labels};
}

void ExpectRows(const std::vector<at::Tensor>& batch,
                const std::vector<int64_t>& samples) {
  ASSERT_EQ(batch.size(), 2u);
  EXPECT_TRUE(at::equal(batch[1], torch::tensor(samples, torch::kLong)));
  const auto count = static_cast<int64_t>(samples.size());
  EXPECT_EQ(batch[0].sizes(), (at::IntArrayRef{count, 2}));
  EXPECT_TRUE(
      at::equal(batch[0].select(1, 0), 10 * batch[1].to(torch::kFloat)));
  EXPECT_TRUE(
      at::equal(batch[0].select(1, 1), 10 * batch[1].to(torch::kFloat) + 1));
}

TEST(TensorDataTest, RowsAreTheSamples) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const TensorData data,
                               TensorData::Create(Numbers(5)));
  EXPECT_EQ(data.num_samples(), 5);
  ExpectRows(data.Rows({4, 0, 4}), {4, 0, 4});
  ExpectRows(data.Rows({}), {});
  EXPECT_THAT(CatchTorch("rows", [&] { (void)data.Rows({5}); }),
              ::testing::Not(IsOk()));
}

TEST(TensorDataTest, WhatHasNoSamplesIsRefused) {
  const struct {
    std::vector<at::Tensor> tensors;
    const char* error;
  } cases[] = {
      {{}, "got none"},
      {{torch::ones({2}), at::Tensor()}, "tensor 1: expected a tensor, got"},
      {{torch::tensor(1)}, "tensor 0: expected samples [N, ...], got a scalar"},
      {{torch::ones({0, 3})}, "got no samples"},
      {{torch::ones({2}), torch::ones({3, 2})}, "expected 2 samples, got 3"},
      {{torch::ones({2}, torch::kMeta)}, "on the CPU, got meta"},
  };
  for (const auto& one : cases) {
    EXPECT_THAT(TensorData::Create(one.tensors).status(),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         AllOf(HasSubstr("TensorData"), HasSubstr(one.error))));
  }
}

TEST(TensorDataTest, RanksTakeTheirPartsOfEachEpoch) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const TensorData data,
                               TensorData::Create(Numbers(8)));
  for (const int workers : {0, 2}) {
    std::multiset<int64_t> seen;
    for (const int rank : {0, 1}) {
      const FakeCommunicator comm(rank, 2);
      TESSERA_ASSERT_OK_AND_ASSIGN(
          const auto loader, LoadInMemory(data.fetch(), data.num_samples(),
                                          comm, LoaderOptions(2, workers)));
      for (int i = 0; i < 2; ++i) {
        TESSERA_ASSERT_OK_AND_ASSIGN(const Batch batch, loader->Next());
        const std::vector<int64_t> samples = IndicesOf(batch);
        ExpectRows(batch.tensors, samples);
        seen.insert(samples.begin(), samples.end());
        EXPECT_EQ(batch.ends_epoch, i == 1);
      }
    }
    EXPECT_EQ(seen, (std::multiset<int64_t>{0, 1, 2, 3, 4, 5, 6, 7}));
  }
}

TEST(TensorDataTest, WithoutShufflingSamplesComeInOrder) {
  TESSERA_ASSERT_OK_AND_ASSIGN(const TensorData data,
                               TensorData::Create(Numbers(6)));
  const FakeCommunicator comm(1, 2);
  TESSERA_ASSERT_OK_AND_ASSIGN(
      const auto loader, LoadInMemory(data.fetch(), 6, comm,
                                      LoaderOptions(3, 0), /*shuffle=*/false));
  TESSERA_ASSERT_OK_AND_ASSIGN(const Batch batch, loader->Next());
  EXPECT_THAT(IndicesOf(batch), ElementsAre(1, 3, 5));
  EXPECT_THAT(LoadInMemory(data.fetch(), 0, comm, LoaderOptions(3, 0)),
              StatusIs(absl::StatusCode::kInvalidArgument));
}

TEST(CollatedTest, SamplesOfAnyTypeAreCollated) {
  struct Word {
    std::string text;
    int64_t label;
  };
  const Fetch fetch = Collated<Word>(
      {{"a", 0}, {"bcd", 1}, {"ef", 2}},
      [](const std::vector<const Word*>& words) {
        std::vector<int64_t> lengths, labels;
        for (const Word* word : words) {
          lengths.push_back(static_cast<int64_t>(word->text.size()));
          labels.push_back(word->label);
        }
        return std::vector<at::Tensor>{torch::tensor(lengths),
                                       torch::tensor(labels)};
      });
  const FakeCommunicator comm;
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto loader,
                               LoadInMemory(fetch, 3, comm, LoaderOptions(3, 1),
                                            /*shuffle=*/false));
  TESSERA_ASSERT_OK_AND_ASSIGN(const Batch batch, loader->Next());
  EXPECT_TRUE(at::equal(batch.tensors[0], torch::tensor({1, 3, 2})));
  EXPECT_TRUE(at::equal(batch.tensors[1], torch::tensor({0, 1, 2})));
}

TEST(CollatedTest, ListsOfTensorsAreStacked) {
  const at::Tensor one = torch::ones({2, 3});
  const Fetch fetch = Collated<std::vector<at::Tensor>>(
      {{one, torch::tensor(7)}, {2 * one, torch::tensor(8)}, {one}}, Stack);
  const FakeCommunicator comm;
  TESSERA_ASSERT_OK_AND_ASSIGN(const auto loader,
                               LoadInMemory(fetch, 3, comm, LoaderOptions(2, 0),
                                            /*shuffle=*/false));
  TESSERA_ASSERT_OK_AND_ASSIGN(const Batch batch, loader->Next());
  EXPECT_TRUE(at::equal(batch.tensors[0], torch::stack({one, 2 * one})));
  EXPECT_TRUE(at::equal(batch.tensors[1], torch::tensor({7, 8})));
  // The third sample lacks its label.
  EXPECT_THAT(loader->Next(), StatusIs(absl::StatusCode::kInvalidArgument,
                                       HasSubstr("1 tensors, another has 2")));
}

}  // namespace
}  // namespace tessera
