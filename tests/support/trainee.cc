#include "tests/support/trainee.h"

#include <torch/torch.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "tests/support/rank_pool.h"

namespace tessera {

absl::StatusOr<Trainee> Trainee::Make(const TrainingSpec& spec,
                                      std::shared_ptr<Communicator> comm) {
  SetPoisonOnFree(spec.poison);
  auto model =
      BuildModel(spec.model, spec.DataRank(comm->rank(), comm->world_size()));
  EngineOptions options;
  options.tensor_cuts = TensorCutsOf(*model, spec);
  options.communicator = std::move(comm);
  return Make(std::move(model), ConfigOf(spec), std::move(options));
}

absl::StatusOr<Trainee> Trainee::Make(std::shared_ptr<TestModel> model,
                                      const proto::Config& config,
                                      std::shared_ptr<Communicator> comm) {
  EngineOptions options;
  options.communicator = std::move(comm);
  return Make(std::move(model), config, std::move(options));
}

absl::StatusOr<Trainee> Trainee::Make(std::shared_ptr<TestModel> model,
                                      const proto::Config& config,
                                      EngineOptions options) {
  Trainee t;
  t.model = std::move(model);
  TESSERA_ASSIGN_OR_RETURN(t.engine,
                           Engine::Create(t.model, config, std::move(options)));
  t.rank = t.engine->data_rank();
  return t;
}

absl::Status Trainee::Backward(int64_t micro_batch, BackwardOptions options) {
  return engine->Backward(Loss(micro_batch), options);
}

absl::Status Trainee::TrainStep(int64_t micro_batch) {
  TESSERA_RETURN_IF_ERROR(Backward(micro_batch));
  return engine->Step();
}

at::Tensor Trainee::parameter(const std::string& name) const {
  return model->named_parameters()[name];
}

absl::StatusOr<std::string> Trainee::Finish() {
  TESSERA_ASSIGN_OR_RETURN(Record record, ParametersOf(*engine, *model));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  return ToText(record);
}

absl::Status ExpectCode(absl::StatusCode code, const absl::Status& got) {
  if (got.code() == code) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "expected ", absl::StatusCodeToString(code), ", got ", got.ToString()));
}

std::vector<std::string> RunOnRanks(int world_size, absl::string_view function,
                                    absl::string_view args,
                                    absl::Duration deadline) {
  std::vector<std::string> texts;
  for (auto& answer :
       RankPool::Get(world_size)->Run(function, args, deadline)) {
    texts.push_back(answer.ok() ? *answer : answer.status().ToString());
  }
  return texts;
}

std::vector<std::string> TakeFirstLines(std::vector<std::string>* texts) {
  std::vector<std::string> first;
  for (std::string& text : *texts) {
    const size_t end = text.find('\n');
    first.push_back(text.substr(0, end));
    text = end == std::string::npos ? "" : text.substr(end + 1);
  }
  return first;
}

Oracle::Loss OwnLoss() {
  return [](torch::nn::Module& module, int rank, int64_t micro_batch) {
    return dynamic_cast<TestModel&>(module).Loss(rank, micro_batch);
  };
}

Oracle::Loss LossOf(int64_t micro_batch) {
  return [micro_batch](torch::nn::Module& module, int rank, int64_t) {
    return dynamic_cast<TestModel&>(module).Loss(rank, micro_batch);
  };
}

void ExpectParameters(const std::vector<std::string>& answers,
                      const TrainingSpec& spec, int world_size,
                      const std::vector<Oracle::Loss>& steps) {
  SCOPED_TRACE(spec.ToText());
  Oracle oracle([&] { return MakeTestModel(spec.model); },
                OracleOptionsOf(spec, world_size));
  for (const Oracle::Loss& loss : steps) oracle.TrainStep(loss);
  ExpectParameters(answers, oracle);
}

void ExpectParameters(const std::vector<std::string>& answers,
                      const Oracle& oracle) {
  for (size_t rank = 0; rank < answers.size(); ++rank) {
    EXPECT_EQ(
        FirstDifference(ParametersOf(oracle), RecordFromText(answers[rank])),
        "")
        << "rank " << rank;
  }
}

}  // namespace tessera
