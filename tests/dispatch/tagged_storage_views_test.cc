// Views of parameters that an engine owns: tagged, whatever made them, so that
// what uses them gathers the unit.
#include <torch/torch.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/dispatch/tagged_storage_util.h"

namespace tessera {
namespace {

using View = std::function<at::Tensor(const at::Tensor&)>;

const std::vector<std::pair<std::string, View>>& Views() {
  static const auto* views = new std::vector<std::pair<std::string, View>>{
      {"alias", [](const auto& w) { return at::alias(w); }},
      {"as_strided", [](const auto& w) { return w.as_strided({4}, {2}, 3); }},
      {"chunk", [](const auto& w) { return w.chunk(3)[2]; }},
      {"detach", [](const auto& w) { return w.detach(); }},
      {"diagonal", [](const auto& w) { return w.diagonal(); }},
      {"expand",
       [](const auto& w) {
         return w.expand({2, 8, 8});
       }},
      {"flatten", [](const auto& w) { return w.flatten(); }},
      {"mT", [](const auto& w) { return w.mT(); }},
      {"narrow", [](const auto& w) { return w.narrow(1, 2, 3); }},
      {"permute", [](const auto& w) { return w.permute({1, 0}); }},
      {"reshape", [](const auto& w) { return w.reshape({4, 16}); }},
      {"select", [](const auto& w) { return w.select(0, 1); }},
      {"slice", [](const auto& w) { return w.slice(0, 1, 7, 2); }},
      {"split", [](const auto& w) { return w.split(3)[1]; }},
      {"split sizes", [](const auto& w) { return w.split({3, 5})[1]; }},
      {"squeeze", [](const auto& w) { return w.unsqueeze(0).squeeze(0); }},
      {"t", [](const auto& w) { return w.t(); }},
      {"transpose", [](const auto& w) { return w.transpose(0, 1); }},
      {"unbind", [](const auto& w) { return w.unbind()[3]; }},
      {"unfold", [](const auto& w) { return w.unfold(0, 4, 2); }},
      {"unsqueeze", [](const auto& w) { return w.unsqueeze(1); }},
      {"view", [](const auto& w) { return w.view({2, 32}); }},
      {"view as ints", [](const auto& w) { return w.view(torch::kInt); }}};
  return *views;
}

class TaggedStorageViewsTest : public TaggedStorageTest {};

TEST_F(TaggedStorageViewsTest, EveryViewIsTaggedAndReadable) {
  auto t = LinearTwins();
  t.Create();
  for (const auto& [name, view] : Views()) {
    SCOPED_TRACE(name);
    const at::Tensor expected = view(t.plain->weight).clone();
    const auto check = [&](const at::Tensor& got) {
      EXPECT_TRUE(got.key_set().has(kTagKey));
      EXPECT_TRUE(got.is_alias_of(t.tagged->weight));
      t.ExpectFreed();  // making it gathered nothing
      EXPECT_TRUE(SameBits(expected, got.clone()));
    };
    check(view(t.tagged->weight));
    {
      torch::NoGradGuard no_grad;
      check(view(t.tagged->weight));
    }
    {
      c10::InferenceMode inference;
      check(view(t.tagged->weight));
    }
  }
}

TEST_F(TaggedStorageViewsTest, GradientsFlowThroughViewsOfViews) {
  auto t = LinearTwins();
  t.Create();
  t.Train([](torch::nn::Linear& m) {
    const at::Tensor& w = m->weight;
    at::Tensor sum = torch::zeros({});
    for (const auto& [name, view] : Views()) {
      if (name == "view as ints") continue;
      sum = sum + view(w).sin().sum() + view(w.t().contiguous()).cos().sum() +
            view(w.unsqueeze(0).squeeze(0)).square().sum();
    }
    return sum;
  });
}

}  // namespace
}  // namespace tessera
