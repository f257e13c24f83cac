// Tests pins: no other pin and no other thread frees what one holds.
#include <torch/torch.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/dispatch/tagged_storage_util.h"

namespace tessera {
namespace {

class PinsOf : public TaggedStorageTest,
               public ::testing::WithParamInterface<int> {};
INSTANTIATE_TEST_SUITE_P(TaggedStorageTest, PinsOf, ::testing::Values(0, 1),
                         ::testing::PrintToStringParamName());

// Two threads compute while a third frees what it can.
TEST_P(PinsOf, UnderThreads) {
  constexpr int kRuns = 2000;
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  auto t = PairTwins();
  TwinOptions options;
  options.max_live = GetParam();
  t.Create(options);
  const at::Tensor x = torch::randn({4, 8});
  at::Tensor expected;
  {
    torch::NoGradGuard no_grad;
    expected = t.plain(x);
  }
  std::atomic<int> computing{2}, runs{0}, wrong{0};
  auto compute = [&] {
    torch::NoGradGuard no_grad;
    at::set_num_threads(1);
    for (int i = 0; i < kRuns && absl::Now() < deadline; ++i) {
      const absl::Status status = CatchTorch("forward", [&] {
        if (!SameBits(t.tagged(x), expected)) ++wrong;
      });
      if (!status.ok()) ++wrong;
      ++runs;
    }
    --computing;
  };
  std::thread first(compute), second(compute);
  std::thread freeing([&] {
    std::vector<std::shared_ptr<FlatParameter>> flats;
    for (const auto& p : t.tagged->parameters()) {
      flats.push_back(Registry::Global().Find(p).flat);
    }
    while (computing > 0) {
      for (const auto& flat : flats) flat->TryFree();
      std::this_thread::yield();
    }
    for (const auto& flat : flats) EXPECT_TRUE(flat->TryFree());
  });
  first.join();
  second.join();
  freeing.join();
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(runs, 2 * kRuns) << "the deadline passed";
  t.ExpectFreed();
}

// A unit that one pin holds is not freed when another pin ends.
TEST_P(PinsOf, TwoHoldersOfAUnit) {
  auto t = PairTwins();
  TwinOptions options;
  options.max_live = GetParam();
  t.Create(options);
  const at::Tensor& w = t.tagged->a->weight;
  const auto flat = Registry::Global().Find(w).flat;
  {
    const Use outer(w);
    t.tagged(torch::randn({4, 8}));  // pins and unpins
    EXPECT_FALSE(flat->TryFree());
    ASSERT_TRUE(flat->whole());
    EXPECT_TRUE(SameBits(t.plain->a->weight, w));
  }
  EXPECT_TRUE(flat->TryFree());
}

// Making the second flat of an operator whole must not free the first.
TEST_P(PinsOf, AllUnitsOfAnOperator) {
  auto t = PairTwins();
  TwinOptions options;
  options.max_live = GetParam();
  t.Create(options);
  const at::Tensor x = torch::randn({4, 8});
  for (int i = 0; i < 2; ++i) {
    t.Train([&](auto& m) {
      const at::Tensor h = torch::addmm(m->a->bias, x, m->b->weight);
      return MeanSquare(
          torch::cat({h, m->a->weight, m->b->weight, m->a->weight}));
    });
  }
}

struct ManyImpl : torch::nn::Module {
  ManyImpl() {
    for (int i = 0; i < 20; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i),
                                       torch::nn::Linear(8, 8)));
    }
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Many);

// A list of parameters in which each unit comes again after all others: each is
// gathered and pinned once.
TEST_P(PinsOf, ManyUnitsOfAnOperator) {
  Twins<Many> t([] { return Many(); });
  TwinOptions options;
  options.max_live = GetParam();
  t.Create(options);
  const auto norms = [](Many& m) {
    torch::NoGradGuard no_grad;
    std::vector<at::Tensor> list;
    for (auto& layer : m->layers) list.push_back(layer->weight);
    for (auto& layer : m->layers) list.push_back(layer->bias);
    return torch::stack(at::_foreach_norm(list));
  };
  const int64_t gathers = t.comm->gathers();
  EXPECT_TRUE(SameBits(norms(t.plain), norms(t.tagged)));
  EXPECT_EQ(t.comm->gathers() - gathers, 20);
  for (const auto& p : t.tagged->parameters()) {
    EXPECT_EQ(Registry::Global().Find(p).flat->pins(), 0);
  }
}

}  // namespace
}  // namespace tessera
