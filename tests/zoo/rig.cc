#include "tests/zoo/rig.h"

#include "absl/strings/str_cat.h"

namespace tessera::zoo {

Rig::Rig(int rank, bool plain)
    : rank_(rank),
      plain_(plain),
      data_(at::detail::createCPUGenerator(500 + static_cast<uint64_t>(rank))),
      common_(at::detail::createCPUGenerator(77)) {
  torch::manual_seed(11);
}

Training* Rig::Train(std::shared_ptr<nn::Module> module, const Recipe& recipe) {
  trained_.emplace_back(module, Make(module, recipe));
  torch::manual_seed(900 + static_cast<uint64_t>(rank_));
  return trained_.back().second.get();
}

void Rig::TrainOn(std::shared_ptr<nn::Module> module,
                  const std::function<Tensor()>& loss, const Recipe& recipe,
                  int steps) {
  Training* const training = Train(std::move(module), recipe);
  for (int i = 0; i < steps * recipe.accumulation; ++i) {
    const Tensor value = training->UnderAutocast([&] { return Part(loss); });
    Note(value);
    training->Backward(value);
    training->Step();
  }
}

void Rig::Note(const Tensor& value) {
  results_.emplace_back(absl::StrCat("note ", results_.size()),
                        value.detach().clone());
}

Results Rig::Finish() {
  results_.emplace_back("generator",
                        at::detail::getDefaultCPUGenerator().get_state());
  for (const auto& [module, training] : trained_) training->Close();
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < trained_.size(); ++i) {
    const nn::Module& module = *trained_[i].first;
    for (const auto& p : module.named_parameters()) {
      results_.emplace_back(absl::StrCat(i, ".", p.key()), p.value().clone());
    }
    for (const auto& b : module.named_buffers()) {
      results_.emplace_back(absl::StrCat(i, ".", b.key()), b.value().clone());
    }
  }
  return std::move(results_);
}

std::map<std::string, Variant>& Variants() {
  static auto* const variants = new std::map<std::string, Variant>;
  return *variants;
}

bool AddVariant(const std::string& name, Variant variant) {
  return Variants().emplace(name, std::move(variant)).second;
}

}  // namespace tessera::zoo
