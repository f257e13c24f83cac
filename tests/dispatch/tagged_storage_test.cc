// The storages of parameters that an engine owns: who may look at them, change
// them or replace them, and what happens to those who may not.
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/dispatch/tagged_storage_util.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Returns what torch::save writes for a module.
template <typename Holder>
std::string Saved(const Holder& module) {
  std::ostringstream out;
  torch::save(module, out);
  return out.str();
}

TEST_F(TaggedStorageTest, SavingAFreedParameterNamesIt) {
  auto t = LinearTwins();
  t.Create();
  // A file that cannot be read back would be worse than an error.
  ASSERT_THAT(
      CatchTorch("save", [&] { Saved(t.tagged); }),
      FailsWith(AllOf(HasSubstr("'weight'"), HasSubstr("tessera::Use(w)"))));

  std::string file;
  {
    Use pin(t.tagged->parameters());
    file = Saved(t.tagged);
  }
  EXPECT_EQ(file.size(), Saved(t.plain).size());
  torch::nn::Linear loaded(8, 8);
  std::istringstream in(file);
  torch::load(loaded, in);
  EXPECT_TRUE(SameBits(loaded->weight, t.plain->weight));
  EXPECT_TRUE(SameBits(loaded->bias, t.plain->bias));
}

TEST_F(TaggedStorageTest, UntaggedAliasOfAFreedStorageCannotBeResizedOrRead) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor& w = t.tagged->weight;
  EXPECT_EQ(w.storage().nbytes(), t.plain->weight.storage().nbytes());
  at::Tensor alias = torch::empty({0});
  auto attach = [&] { alias.set_(w.storage(), 0, w.sizes(), w.strides()); };
  EXPECT_THAT(CatchTorch("set_", attach), FailsWith(HasSubstr("'weight'")));
  {
    Use pin(w);
    attach();
  }
  ASSERT_FALSE(alias.key_set().has(kTagKey));  // the engine knows nothing of it

  EXPECT_THAT(CatchTorch("read", [&] { return alias.sum(); }),
              FailsWith(HasSubstr("'weight'")));
  EXPECT_THAT(CatchTorch("read", [&] { alias.const_data_ptr(); }),
              FailsWith(HasSubstr("'weight'")));
  EXPECT_THAT(CatchTorch("write", [&] { alias.fill_(1); }),
              FailsWith(HasSubstr("'weight'")));
  auto resize = [&] { alias.view({64}).resize_({1000}); };
  EXPECT_THAT(CatchTorch("resize", resize),
              FailsWith(HasSubstr("not resizable")));

  Use pin(w);
  ASSERT_TRUE(SameBits(alias, t.plain->weight));
  EXPECT_THAT(CatchTorch("resize", resize),
              FailsWith(HasSubstr("not resizable")));
  EXPECT_EQ(w.const_data_ptr(), alias.const_data_ptr());
}

// A unit that happens to be whole still gives no memory away: whether a write
// is kept must not depend on what was used before.
TEST_F(TaggedStorageTest, WholeButUnusedParameterCannotBeReadOrWritten) {
  auto t = LinearTwins();
  TwinOptions options;
  options.max_live = 1000000;
  t.Create(options);
  const at::Tensor w = t.tagged->weight;
  for (int i = 0; i < 2; ++i) {
    torch::NoGradGuard no_grad;
    t.tagged(torch::randn({4, 8}));
    ASSERT_TRUE(Registry::Global().Find(w).flat->whole());
    EXPECT_THAT(CatchTorch("write", [&] { w.mutable_data_ptr<float>(); }),
                FailsWith(HasSubstr("'weight'")));
    EXPECT_THAT(CatchTorch("read", [&] { w.const_data_ptr<float>(); }),
                FailsWith(HasSubstr("'weight'")));
  }
  {
    const Use pin(w);
    w.mutable_data_ptr<float>()[0] = 7;
  }
  {
    torch::NoGradGuard no_grad;
    t.plain->weight.view(-1)[0] = 7;
  }
  t.ExpectSameParameters();
}

TEST_F(TaggedStorageTest, WriteThroughAnUntaggedAliasIsKept) {
  auto t = LinearTwins();
  at::Tensor alias = t.tagged->weight.detach();
  t.Create();
  {
    Use pin(t.tagged->weight);
    alias.mul_(3);
  }
  {
    torch::NoGradGuard no_grad;
    t.plain->weight.mul_(3);
  }
  t.ExpectFreed();
  t.ExpectSameParameters();
}

TEST_F(TaggedStorageTest, AliasTakenBeforeCreateFollowsTheParameter) {
  auto t = LinearTwins();
  at::Tensor alias = t.tagged->weight.detach();
  at::Tensor plain_alias = t.plain->weight.detach();
  t.Create();
  ASSERT_TRUE(alias.is_alias_of(t.tagged->weight));
  EXPECT_THAT(CatchTorch("read", [&] { return alias.sum(); }),
              FailsWith(HasSubstr("'weight'")));
  const at::Tensor x = torch::randn({4, 8});
  for (int i = 0; i < 3; ++i) {
    t.Train([&](auto& m) { return MeanSquare(m(x)); });
    Use pin(t.tagged->weight);
    EXPECT_TRUE(SameBits(alias, plain_alias)) << "after step " << i;
  }
  TESSERA_ASSERT_OK(t.engine->Close());
  EXPECT_TRUE(SameBits(alias, plain_alias)) << "after Close";
}

// Two parameters in one storage, the second at an odd offset, and a rest that
// belongs to neither.
struct SharingImpl : torch::nn::Module {
  SharingImpl() {
    base = torch::randn({37});
    first = register_parameter("first", base.narrow(0, 0, 17));
    second = register_parameter("second", base.narrow(0, 17, 12).view({3, 4}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::tanh(x.mm(second)).sum() + (first * first).sum();
  }
  at::Tensor base, first, second;
};
TORCH_MODULE(Sharing);

TEST_F(TaggedStorageTest, ParametersThatShareAStoragePartly) {
  Twins<Sharing> t([] { return Sharing(); });
  t.Create();
  ASSERT_TRUE(t.tagged->first.is_alias_of(t.tagged->second));
  EXPECT_EQ(t.tagged->second.storage_offset(), 17);
  const at::Tensor x = torch::randn({5, 3});
  for (int i = 0; i < 3; ++i) {
    t.Train([&](auto& m) { return m(x); });
    Use pin(t.tagged->first);
    EXPECT_TRUE(SameBits(t.tagged->base, t.plain->base)) << "after step " << i;
  }
}

TEST_F(TaggedStorageTest, ChannelsLastKeepsItsLayout) {
  Twins<torch::nn::Conv2d> t([] {
    torch::nn::Conv2d conv(torch::nn::Conv2dOptions(4, 8, 3));
    conv->weight.set_data(
        conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
    return conv;
  });
  t.Create();
  EXPECT_EQ(t.tagged->weight.strides(), t.plain->weight.strides());
  const at::Tensor x =
      torch::randn({2, 4, 9, 9}).contiguous(at::MemoryFormat::ChannelsLast);
  auto loss = [&](auto& m) { return MeanSquare(m(x)); };
  t.Backward(loss);
  t.ExpectSameGradients();
  TESSERA_ASSERT_OK_AND_ASSIGN(at::Tensor gradient,
                               t.engine->Gradient("weight"));
  EXPECT_EQ(gradient.strides(), t.PlainGradient(0).strides());
  TESSERA_EXPECT_OK(t.engine->Step());
  t.StepPlain();
  t.Train(loss);
  EXPECT_EQ(t.tagged->weight.strides(), t.plain->weight.strides());
}

TEST_F(TaggedStorageTest, TorchLoadAfterCreateWritesTheValues) {
  auto t = LinearTwins();
  t.Create();
  const std::string file = Saved(torch::nn::Linear(8, 8));  // other values
  for (auto* m : {&t.plain, &t.tagged}) {
    std::istringstream in(file);
    torch::load(*m, in);
  }
  t.ExpectFreed();
  t.ExpectSameParameters();
  const at::Tensor x = torch::randn({4, 8});
  t.Train([&](auto& m) { return MeanSquare(m(x)); });
}

TEST_F(TaggedStorageTest, TorchLoadOfAnotherShapeIsRefusedByName) {
  auto t = LinearTwins();
  t.Create();
  std::istringstream in(Saved(torch::nn::Linear(8, 9)));
  EXPECT_THAT(CatchTorch("load", [&] { torch::load(t.tagged, in); }),
              FailsWith(HasSubstr("'weight'")));
  t.ExpectFreed();
  t.ExpectSameParameters();
}

TEST_F(TaggedStorageTest, ModuleToOtherDtypeIsRefusedByName) {
  auto t = LinearTwins();
  t.Create();
  EXPECT_THAT(CatchTorch("to", [&] { t.tagged->to(torch::kDouble); }),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       AllOf(HasSubstr("'weight'"),
                             HasSubstr("before Engine::Create"))));
  t.tagged->to(torch::kFloat);  // what it is already
  t.ExpectFreed();
  t.ExpectSameParameters();
}

TEST_F(TaggedStorageTest, VectorToParametersWrites) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor values = torch::randn({8 * 8 + 8});
  for (auto* m : {&t.plain, &t.tagged}) {
    torch::nn::utils::vector_to_parameters(values, (*m)->parameters());
  }
  t.ExpectFreed();
  t.ExpectSameParameters();
  const at::Tensor x = torch::randn({4, 8});
  t.Train([&](auto& m) { return MeanSquare(m(x)); });
}

TEST_F(TaggedStorageTest, SetDataWritesAndSharesItsSource) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor values = torch::randn({8, 8});
  std::vector<at::Tensor> sources;
  for (auto* m : {&t.plain, &t.tagged}) {
    sources.push_back(values.clone());
    (*m)->weight.set_data(sources.back());
  }
  t.ExpectFreed();
  t.ExpectSameParameters();
  // From then on the source and the parameter are one memory.
  for (at::Tensor& source : sources) source.mul_(2);
  t.ExpectSameParameters();
  const at::Tensor x = torch::randn({4, 8});
  t.Train([&](auto& m) { return MeanSquare(m(x)); });
  EXPECT_TRUE(SameBits(sources[0], sources[1].clone()));
}

TEST_F(TaggedStorageTest, SetDataOfAnotherShapeIsRefused) {
  auto t = LinearTwins();
  t.Create();
  for (const at::Tensor& other :
       {torch::zeros({9, 8}), torch::zeros({8, 8}, torch::kDouble)}) {
    EXPECT_THAT(
        CatchTorch("set_data", [&] { t.tagged->weight.set_data(other); }),
        StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("'weight'")));
  }
  EXPECT_THAT(
      CatchTorch("set_", [&] { t.tagged->weight.detach().set_(); }),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("'weight'")));
  EXPECT_EQ(t.tagged->weight.sizes(), t.plain->weight.sizes());
  t.ExpectFreed();
  t.ExpectSameParameters();
}

TEST_F(TaggedStorageTest, StorageReplacedBehindTheDispatcherIsFound) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor w = t.tagged->weight;
  const at::Storage kept = w.storage();
  w.unsafeGetTensorImpl()->set_storage_keep_dtype(
      torch::zeros({8, 8}).storage());
  const at::Tensor x = torch::randn({4, 8});
  EXPECT_THAT(
      t.engine->Backward(MeanSquare(t.tagged(x))),
      StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("'weight'")));
  w.unsafeGetTensorImpl()->set_storage_keep_dtype(kept);
  t.Train([&](auto& m) { return MeanSquare(m(x)); });
}

TEST_F(TaggedStorageTest, WritesOfTheUserAreKept) {
  auto t = LinearTwins();
  t.Create();
  const std::vector<
      std::pair<std::string, std::function<void(const at::Tensor&)>>>
      writes = {
          {"mul_", [](const at::Tensor& w) { w.mul_(1.5); }},
          {"a view's", [](const at::Tensor& w) { w.t()[3].add_(1); }},
          {"a view's view's",
           [](const at::Tensor& w) {
             w.view(-1).unfold(0, 4, 4).select(1, 2).fill_(-2);
           }},
          {"a list's",
           [](const at::Tensor& w) { torch::_foreach_add_({w}, 1); }},
          {"an output's", [](at::Tensor w) { torch::mul_out(w, w, w); }},
          {"index_put_",
           [](const at::Tensor& w) {
             w.index_put_({torch::tensor({1, 5})}, torch::ones({8}));
           }},
          {"init's",
           [](const at::Tensor& w) {
             torch::manual_seed(3);
             torch::nn::init::orthogonal_(w);
           }},
      };
  for (const auto& [name, write] : writes) {
    for (auto* m : {&t.plain, &t.tagged}) {
      torch::NoGradGuard no_grad;
      write((*m)->weight);
    }
    SCOPED_TRACE(name);
    t.ExpectFreed();
    t.ExpectSameParameters();
  }
}

}  // namespace
}  // namespace tessera
