#include "tests/support/training.h"

#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"
#include "base/memory/memory.h"
#include "base/status.h"
#include "engine/construct_sharded.h"
#include "gtest/gtest.h"
#include "testing/device/test_device.h"
#include "tests/support/device_group.h"
#include "tests/support/device_kernels.h"
#include "tests/support/rank_pool.h"
#include "verify/plain/plain_autograd.h"

namespace tessera {
namespace {

bool IsTestDevice(const TrainingSpec& spec) {
  return !spec.device.empty() && absl::ascii_isdigit(spec.device[0]);
}

std::optional<at::Device> DeviceOf(const TrainingSpec& spec) {
  if (spec.device.empty()) return std::nullopt;
  if (!IsTestDevice(spec)) return at::Device(spec.device);
  return testdevice::TestDevice(std::stoi(spec.device));
}

// Chooses GPU kernels whose bits are the same in each run.
void ChooseKernels(const TrainingSpec& spec) {
  if (spec.OracleDevice().is_cpu()) return;
  at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/true);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

std::string OutcomeLine(int step, bool skipped, double scale, double norm) {
  if (skipped) {
    return absl::StrCat("step ", step, ": skipped, scale ", HexFloat(scale));
  }
  return absl::StrCat("step ", step, ": scale ", HexFloat(scale), ", norm ",
                      HexFloat(norm));
}

std::string OutcomeLine(int step, const Oracle::Outcome& outcome) {
  return OutcomeLine(step, outcome.skipped, outcome.scale, outcome.norm);
}

std::string OutcomeLine(int step, const StepReport& report) {
  return OutcomeLine(step, report.skipped, report.loss_scale, report.grad_norm);
}

std::vector<Record> RecordOracle(const TrainingSpec& spec, int world_size) {
  ChooseKernels(spec);
  const auto make_model = [&] {
    auto model = MakeTestModel(spec.model);
    model->to(spec.OracleDevice());
    return model;
  };
  OracleOptions options = OracleOptionsOf(spec, world_size);
  for (const TensorCut& cut : TensorCutsOf(*make_model(), spec)) {
    options.tensor_cuts.push_back({cut.parameter, cut.dim, cut.groups});
  }
  Oracle oracle(make_model, options);
  std::vector<Record> records(static_cast<size_t>(world_size));
  auto add_to_all = [&](const std::string& line) {
    for (Record& record : records) record.push_back(line);
  };
  for (int step = 0; step < spec.steps; ++step) {
    auto losses = oracle.TrainStep(
        [](torch::nn::Module& module, int rank, int64_t micro_batch) {
          return dynamic_cast<TestModel&>(module).Loss(rank, micro_batch);
        });
    for (size_t r = 0; r < records.size(); ++r) {
      for (int i = 0; i < spec.accumulation; ++i) {
        const int of = spec.DataRank(static_cast<int>(r), world_size);
        records[r].push_back(LossLine(step, i, losses[of][i]));
      }
    }
    for (const std::string& name : oracle.parameter_names()) {
      if (!spec.gradients) break;
      at::Tensor gradient = oracle.gradient(name);
      const double inverse = 1 / oracle.outcome().divisor;
      if (gradient.defined() && inverse != 1) gradient = gradient.mul(inverse);
      add_to_all(absl::StrCat("step ", step, ": gradient of ", name, " ",
                              PrintOf(gradient)));
    }
    if (spec.outcomes) add_to_all(OutcomeLine(step, oracle.outcome()));
  }
  for (const std::string& line : ParametersOf(oracle)) add_to_all(line);
  for (int r = 0; r < world_size; ++r) {
    const int data_rank = spec.DataRank(r, world_size);
    AddState(oracle.module(data_rank), oracle.generator_state(data_rank),
             &records[r]);
  }
  return records;
}

TESSERA_RANK_FUNCTION(Train) {
  TESSERA_ASSIGN_OR_RETURN(
      Record record,
      TrainWithEngine(TrainingSpec::FromText(args), world.communicator()));
  return ToText(record);
}

// Returns the names of distinct parameters, as the oracle has them.
std::vector<std::string> ParameterNames(const torch::nn::Module& module) {
  std::vector<std::string> names;
  std::vector<const void*> seen;
  for (const auto& p : module.named_parameters()) {
    const void* impl = p.value().unsafeGetTensorImpl();
    if (std::find(seen.begin(), seen.end(), impl) != seen.end()) continue;
    seen.push_back(impl);
    names.push_back(p.key());
  }
  return names;
}

}  // namespace

// Each parameter that can be cut in several ways is cut in the one, or left
// whole, that `spec.cuts` and its number say.
std::vector<TensorCut> TensorCutsOf(const torch::nn::Module& module,
                                    const TrainingSpec& spec) {
  std::vector<TensorCut> cuts;
  if (spec.tensor == 1) return cuts;
  std::map<const void*, int> sharers;
  for (const std::string& name : ParameterNames(module)) {
    const at::Tensor p = module.named_parameters()[name];
    if (p.has_storage()) ++sharers[p.storage().unsafeGetStorageImpl()];
  }
  size_t number = static_cast<size_t>(spec.cuts);
  for (const std::string& name : ParameterNames(module)) {
    const at::Tensor p = module.named_parameters()[name];
    ++number;
    if (!p.is_floating_point() || p.numel() == 0 ||
        sharers[p.storage().unsafeGetStorageImpl()] > 1) {
      continue;
    }
    std::vector<int64_t> dims;
    for (int64_t d = 0; d < p.dim(); ++d) {
      if (p.size(d) % spec.tensor == 0) dims.push_back(d);
    }
    const size_t way = number % (dims.size() + 1);
    if (way == dims.size()) continue;
    // Some of those that can be are cut in groups.
    const int64_t size = p.size(dims[way]);
    const bool groups = size % (3 * spec.tensor) == 0 && number % 2 == 0;
    cuts.push_back({name, dims[way], groups ? 3 : 1});
  }
  return cuts;
}

std::shared_ptr<TestModel> BuildModel(absl::string_view name, int rank) {
  at::set_num_threads(1);  // as the oracle
  torch::manual_seed(TrainingSpec::kModelSeed);
  auto model = MakeTestModel(name);
  torch::manual_seed(TrainingSpec::kRankSeed + static_cast<uint64_t>(rank));
  return model;
}

absl::StatusOr<std::shared_ptr<TestModel>> ConstructModel(
    absl::string_view name, int64_t budget,
    std::shared_ptr<Communicator> comm) {
  at::set_num_threads(1);  // as the oracle
  torch::manual_seed(TrainingSpec::kModelSeed);
  ConstructOptions options;
  options.communicator = comm;
  auto model = ConstructSharded(
      budget, [&] { return MakeTestModel(name); }, options);
  torch::manual_seed(TrainingSpec::kRankSeed +
                     static_cast<uint64_t>(comm->rank()));
  return model;
}

void PrepareDevice(const TrainingSpec& spec, int rank) {
  if (!IsTestDevice(spec)) return;
  testdevice::Register({});
  RegisterTestDeviceKernels();
  testdevice::SetMode(absl::StrContains(spec.device, "workers")
                          ? testdevice::Mode::kWorkers
                          : testdevice::Mode::kAtOnce);
  testdevice::ClearFaults();
  testdevice::ManualSeed(TrainingSpec::kRankSeed + static_cast<uint64_t>(rank));
}

absl::StatusOr<std::shared_ptr<Communicator>> CommunicatorOf(
    const TrainingSpec& spec, std::shared_ptr<Communicator> comm) {
  if (!IsTestDevice(spec) || absl::StrContains(spec.device, "host")) {
    return comm;
  }
  return DeviceGroup(comm, *DeviceOf(spec));
}

absl::Status CheckFaults(const TrainingSpec& spec) {
  if (!IsTestDevice(spec)) return absl::OkStatus();
  testdevice::CheckFreed();
  const std::vector<testdevice::Fault> faults = testdevice::Faults();
  if (faults.empty()) return absl::OkStatus();
  std::string text = absl::StrCat(faults.size(), " faults of order");
  for (size_t i = 0; i < std::min<size_t>(faults.size(), 5); ++i) {
    absl::StrAppend(&text, "\n", faults[i].message);
  }
  return absl::InternalError(text);
}

absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(
    std::shared_ptr<torch::nn::Module> model, const TrainingSpec& spec,
    std::shared_ptr<Communicator> comm) {
  ChooseKernels(spec);
  EngineOptions options;
  options.communicator = std::move(comm);
  options.device = DeviceOf(spec);
  options.tensor_cuts = TensorCutsOf(*model, spec);
  return Engine::Create(std::move(model), ConfigOf(spec), options);
}

namespace {

absl::Status MoveStates(Engine& engine, const TrainingSpec& spec, int step) {
  if (spec.moved.empty()) return absl::OkStatus();
  if (step == 3) return engine.Reload();
  if (step != 1) return absl::OkStatus();
  OffloadStates states;
  states.device = spec.moved;
  states.nvme_path = TrainingSpec::SwapFolder();
  states.parameters = spec.served == "off";
  return engine.Offload(states);
}

}  // namespace

namespace {

absl::Status BackwardOfEach(Engine& engine, TestModel& model,
                            const TrainingSpec& spec, int rank, int step,
                            Record* record) {
  for (int i = 0; i < spec.accumulation; ++i) {
    at::Tensor loss = model.Loss(rank, step * spec.accumulation + i);
    BackwardOptions options;
    if (spec.weights) {
      options.weight = WeightOf(rank, step * spec.accumulation + i);
    }
    TESSERA_RETURN_IF_ERROR(engine.Backward(loss, options));
    record->push_back(LossLine(step, i, loss));
    if (i + 1 < spec.accumulation) TESSERA_RETURN_IF_ERROR(engine.Step());
  }
  return absl::OkStatus();
}

absl::Status BackwardOfBatch(Engine& engine, TestModel& model,
                             const TrainingSpec& spec, int rank, int step,
                             Record* record) {
  const int64_t first = int64_t{step} * spec.accumulation;
  BatchOptions options;
  for (int i = 0; spec.weights && i < spec.accumulation; ++i) {
    options.weights.push_back(WeightOf(rank, first + i));
  }
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<at::Tensor> losses,
      engine.BackwardBatch(
          [&](int64_t i) { return model.Loss(rank, first + i); }, options));
  for (size_t i = 0; i < losses.size(); ++i) {
    record->push_back(LossLine(step, static_cast<int>(i), losses[i]));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TrainSteps(Engine& engine, TestModel& model,
                        const TrainingSpec& spec, int rank, int first,
                        Record* record) {
  for (int step = first; step < spec.steps; ++step) {
    TESSERA_RETURN_IF_ERROR(MoveStates(engine, spec, step));
    TESSERA_RETURN_IF_ERROR(
        spec.pipeline > 1
            ? BackwardOfBatch(engine, model, spec, rank, step, record)
            : BackwardOfEach(engine, model, spec, rank, step, record));
    for (const std::string& name : ParameterNames(model)) {
      if (!spec.gradients) break;
      TESSERA_ASSIGN_OR_RETURN(at::Tensor gradient, engine.Gradient(name));
      record->push_back(absl::StrCat("step ", step, ": gradient of ", name, " ",
                                     PrintOf(gradient)));
    }
    TESSERA_RETURN_IF_ERROR(engine.Step());
    if (spec.outcomes) record->push_back(OutcomeLine(step, engine.last_step()));
  }
  return absl::OkStatus();
}

absl::Status AddFinalState(Engine& engine, const TestModel& model,
                           Record* record) {
  TESSERA_ASSIGN_OR_RETURN(Record parameters, ParametersOf(engine, model));
  record->insert(record->end(), parameters.begin(), parameters.end());
  const at::Device device = model.parameters()[0].device();
  AddState(model, at::globalContext().defaultGenerator(device).get_state(),
           record);
  return absl::OkStatus();
}

absl::StatusOr<Record> TrainWithEngine(const TrainingSpec& spec,
                                       std::shared_ptr<Communicator> comm) {
  const int rank = spec.DataRank(comm->rank(), comm->world_size());
  SetPoisonOnFree(spec.poison);
  PrepareDevice(spec, rank);
  TESSERA_ASSIGN_OR_RETURN(comm, CommunicatorOf(spec, std::move(comm)));
  std::shared_ptr<TestModel> model;
  if (spec.construct_budget > 0) {
    TESSERA_ASSIGN_OR_RETURN(
        model, ConstructModel(spec.model, spec.construct_budget, comm));
  } else {
    model = BuildModel(spec.model, rank);
  }
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, std::move(comm)));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, spec, rank, /*first=*/0, &record));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  Record masters;  // of the dtype that the module had
  for (const std::string& name : ParameterNames(*model)) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor master, engine->Master(name));
    masters.push_back(ParameterLine(name, master.to(at::kFloat)));
  }
  TESSERA_RETURN_IF_ERROR(engine->Close());
  Record closed;
  for (const std::string& name : ParameterNames(*model)) {
    closed.push_back(ParameterLine(
        name, model->named_parameters()[name].detach().to(at::kFloat)));
  }
  TESSERA_RETURN_IF_ERROR(CheckFaults(spec));
  const std::string difference = FirstDifference(masters, closed);
  if (difference.empty()) return record;
  return absl::InternalError(absl::StrCat("after Close\n", difference));
}

absl::StatusOr<Record> ParametersOf(Engine& engine,
                                    const torch::nn::Module& model) {
  Record record;
  for (const std::string& name : ParameterNames(model)) {
    TESSERA_ASSIGN_OR_RETURN(at::Tensor parameter, engine.Parameter(name));
    record.push_back(ParameterLine(name, parameter));
  }
  return record;
}

Record ParametersOf(const Oracle& oracle) {
  Record record;
  for (const std::string& name : oracle.parameter_names()) {
    record.push_back(ParameterLine(name, oracle.parameter(name)));
  }
  return record;
}

const std::vector<Record>& TrainWithOracle(const TrainingSpec& spec,
                                           int world_size) {
  static auto* records = new std::map<std::string, std::vector<Record>>();
  auto [it, absent] = records->try_emplace(absl::StrCat(
      spec.ResultText(), " W", world_size, " ", spec.OracleDevice().str()));
  if (absent) {
    PlainAutograd plain;  // with which nothing of ours saves tensors
    it->second = RecordOracle(spec, world_size);
  }
  return it->second;
}

void ExpectEqualsOracle(const TrainingSpec& spec, int world_size) {
  SCOPED_TRACE(spec.ToText());
  const std::vector<Record>& expected = TrainWithOracle(spec, world_size);
  auto answers = RankPool::Get(world_size)->Run("Train", spec.ToText());
  for (int rank = 0; rank < world_size; ++rank) {
    ASSERT_TRUE(answers[rank].ok())
        << "rank " << rank << ": " << answers[rank].status();
    EXPECT_EQ(FirstDifference(expected[rank], RecordFromText(*answers[rank])),
              "")
        << "rank " << rank;
  }
}

std::string LossLine(int step, int micro_batch, const at::Tensor& loss) {
  return absl::StrCat("step ", step, ", micro-batch ", micro_batch, ": loss ",
                      HexFloat(loss.item<float>()));
}

std::string ParameterLine(const std::string& name, const at::Tensor& value) {
  return absl::StrCat("parameter ", name, " ", PrintOf(value));
}

void AddState(const torch::nn::Module& module, const at::Tensor& generator,
              Record* record) {
  for (const auto& buffer : module.named_buffers()) {
    record->push_back(
        absl::StrCat("buffer ", buffer.key(), " ", PrintOf(buffer.value())));
  }
  record->push_back(absl::StrCat("generator ", PrintOf(generator)));
}

std::string ToText(const Record& record) { return absl::StrJoin(record, "\n"); }

Record RecordFromText(absl::string_view text) {
  return absl::StrSplit(text, '\n');
}

std::string FirstDifference(const Record& expected, const Record& got) {
  for (size_t i = 0; i < std::max(expected.size(), got.size()); ++i) {
    const std::string want = i < expected.size() ? expected[i] : "nothing";
    const std::string have = i < got.size() ? got[i] : "nothing";
    if (want != have) {
      return absl::StrCat("expected: ", want, "\n     got: ", have);
    }
  }
  return "";
}

std::string PrintOf(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  const at::Tensor dense = tensor.detach().cpu().contiguous();
  return absl::StrFormat("[%s] %s %016x", absl::StrJoin(dense.sizes(), ", "),
                         c10::toString(dense.scalar_type()),
                         Fingerprint(dense.const_data_ptr(),
                                     static_cast<int64_t>(dense.nbytes())));
}

}  // namespace tessera
