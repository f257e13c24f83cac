// Computes by the oracle, from the saved masters, what the step after a
// checkpoint must have, whoever loads it.
#ifndef TESTS_CHECKPOINT_NEXT_STEP_H_
#define TESTS_CHECKPOINT_NEXT_STEP_H_

#include <torch/torch.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/models/models.h"
#include "tests/support/training.h"
#include "verify/oracle.h"

namespace tessera {

// Returns the saved masters.
inline std::map<std::string, at::Tensor> MastersIn(const std::string& dir) {
  CheckpointReader reader =
      CheckpointReader::Open(dir, FileSystem::Real()).value();
  std::map<std::string, at::Tensor> masters;
  for (int s = 0; s < reader.manifest().storages_size(); ++s) {
    const proto::CheckpointStorage& storage = reader.manifest().storages(s);
    if (storage.buffer()) continue;
    const at::Tensor all = at::empty({storage.numel()});
    const WantedElements wanted = {s, 0, 0, storage.numel(),
                                   static_cast<char*>(all.mutable_data_ptr())};
    EXPECT_THAT(reader.Read({wanted}, 1), IsOk());
    for (const auto& tensor : storage.tensors()) {
      masters[tensor.name()] = all.as_strided(
          std::vector<int64_t>(tensor.sizes().begin(), tensor.sizes().end()),
          std::vector<int64_t>(tensor.strides().begin(),
                               tensor.strides().end()),
          tensor.offset());
    }
  }
  return masters;
}

// Returns the losses and gradients that the oracle computes on `world_size`
// ranks from these masters, as a record of each rank.
inline std::vector<Record> NextStepOfOracle(
    const std::map<std::string, at::Tensor>& masters, const TrainingSpec& spec,
    int world_size) {
  Oracle oracle(
      [&] {
        auto model = MakeTestModel(spec.model);
        const torch::NoGradGuard no_gradients;
        for (auto& item : model->named_parameters()) {
          item.value().copy_(masters.at(item.key()));
        }
        return model;
      },
      OracleOptionsOf(spec, world_size));
  const auto losses = oracle.TrainStep(
      [&](torch::nn::Module& module, int rank, int64_t micro_batch) {
        return dynamic_cast<TestModel&>(module).Loss(rank,
                                                     spec.steps + micro_batch);
      });
  std::vector<Record> records;
  for (const auto& of_rank : losses) {
    Record& record = records.emplace_back();
    record.push_back(LossLine(spec.steps, 0, of_rank.at(0)));
    for (const std::string& name : oracle.parameter_names()) {
      record.push_back(absl::StrCat("step ", spec.steps, ": gradient of ", name,
                                    " ", PrintOf(oracle.gradient(name))));
    }
  }
  return records;
}

}  // namespace tessera
#endif  // TESTS_CHECKPOINT_NEXT_STEP_H_
