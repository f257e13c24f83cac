#include "tests/models/models.h"

#include <torch/torch.h>

#include <algorithm>

#include "absl/strings/strip.h"
#include "tests/models/models_internal.h"

namespace tessera {
namespace {

const ModelMakers& Makers() {
  static const auto* makers = [] {
    auto* all = new ModelMakers(NetworkModels());
    all->merge(ParameterModels());
    all->merge(BatchModels());
    all->merge(LoopModels());
    all->merge(ZooModels());
    return all;
  }();
  return *makers;
}

}  // namespace

at::ScalarType TestModel::dtype() const {
  for (const at::Tensor& p : parameters()) {
    if (p.is_floating_point()) return p.scalar_type();
  }
  return torch::kFloat;
}

std::shared_ptr<TestModel> MakeTestModel(absl::string_view name) {
  const bool divides_inputs = absl::ConsumePrefix(&name, "Divided:");
  auto maker = Makers().find(std::string(name));
  TORCH_CHECK(maker != Makers().end(), "no test model ", std::string(name));
  auto model = maker->second();
  model->divides_inputs = divides_inputs;
  return model;
}

std::vector<std::string> TestModelNames() {
  std::vector<std::string> names;
  const ModelMakers zoo = ZooModels();
  for (const auto& maker : Makers()) {
    if (zoo.count(maker.first) == 0) names.push_back(maker.first);
  }
  return names;
}

std::vector<std::string> TestModelNamesForStage3() {
  std::vector<std::string> names = TestModelNames();
  for (const char* name : {"OneRankForward", "Wandering"}) {
    names.erase(std::find(names.begin(), names.end(), name));
  }
  return names;
}

}  // namespace tessera
