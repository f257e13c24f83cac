// Operators that look at sizes or make views of parameters that an engine owns.
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/dispatch/tagged_storage_util.h"

namespace tessera {
namespace {

TEST_F(TaggedStorageTest, MetadataOperatorsDoNotGather) {
  auto t = LinearTwins();
  t.Create();
  const at::Tensor w = t.tagged->weight;
  const at::Tensor x = torch::randn({8, 8});
  auto gathers = [&](const std::function<void()>& f) {
    const int64_t before = t.comm->gathers();
    f();
    return t.comm->gathers() - before;
  };
  const std::vector<std::pair<std::string, std::function<void()>>> free = {
      {"size", [&] { EXPECT_EQ(w.size(0) * w.stride(0), 64); }},
      {"t", [&] { EXPECT_EQ(w.t().stride(0), 1); }},
      {"transpose", [&] { w.transpose(0, 1); }},
      {"permute",
       [&] {
         w.permute({1, 0});
       }},
      {"view", [&] { EXPECT_EQ(w.view({-1}).numel(), 64); }},
      {"reshape",
       [&] {
         w.reshape({4, 16});
       }},
      {"flatten", [&] { w.flatten(); }},
      {"unsqueeze", [&] { w.unsqueeze(0); }},
      {"select", [&] { EXPECT_EQ(w[7].storage_offset(), 56); }},
      {"slice", [&] { w.slice(0, 2, 4); }},
      {"narrow", [&] { w.narrow(1, 2, 4); }},
      {"diagonal", [&] { w.diagonal(); }},
      {"unfold", [&] { w.unfold(0, 2, 2); }},
      {"as_strided",
       [&] {
         w.as_strided({2, 2}, {8, 1}, 3);
       }},
      {"expand",
       [&] {
         w.unsqueeze(0).expand({3, 8, 8});
       }},
      {"unbind", [&] { EXPECT_EQ(w.unbind(0).size(), 8); }},
      {"chunk", [&] { EXPECT_EQ(w.chunk(3).size(), 3); }},
      {"split", [&] { w.split(3); }},
      {"detach", [&] { w.detach(); }},
      {"data", [&] { w.data(); }},
      {"alias", [&] { torch::alias(w); }},
      {"zeros_like", [&] { torch::zeros_like(w); }},
      {"ones_like", [&] { torch::ones_like(w); }},
      {"empty_like", [&] { torch::empty_like(w); }},
      {"randn_like", [&] { torch::randn_like(w); }},
      {"new_zeros", [&] { w.new_zeros({3}); }},
      {"to its own dtype", [&] { w.to(torch::kFloat); }},
      {"contiguous, being so", [&] { w.contiguous(); }},
      {"expand_as", [&] { torch::ones({8}).expand_as(w); }},
      {"view_as", [&] { x.view_as(w); }},
      {"type_as", [&] { x.type_as(w); }},
      {"requires_grad_", [&] { w.requires_grad_(true); }},
      {"numel", [&] { EXPECT_EQ(w.numel() * w.dim(), 128); }},
      {"zero_grad", [&] { t.tagged->zero_grad(); }},
      {"named_parameters", [&] { t.tagged->named_parameters(); }},
  };
  for (const auto& [name, f] : free) EXPECT_EQ(gathers(f), 0) << name;

  const std::vector<std::pair<std::string, std::function<void()>>> once = {
      {"contiguous, to be made so", [&] { w.t().contiguous(); }},
      {"reshape that copies", [&] { w.t().reshape({64}); }},
      {"to another dtype", [&] { w.to(torch::kDouble); }},
      {"clone", [&] { w.clone(); }},
      {"item", [&] { w[0][0].item<float>(); }},
      {"sum", [&] { w.sum(); }},
  };
  for (const auto& [name, f] : once) EXPECT_EQ(gathers(f), 1) << name;
  EXPECT_TRUE(SameBits(w.t().contiguous(), t.plain->weight.t().contiguous()));
}

}  // namespace
}  // namespace tessera
