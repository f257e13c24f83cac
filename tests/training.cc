#include "tests/training.h"

#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"
#include "base/memory.h"
#include "base/status.h"
#include "gtest/gtest.h"
#include "tests/rank_pool.h"

namespace tessera {
namespace {

constexpr uint64_t kModelSeed = 20;
constexpr uint64_t kRankSeed = 7000;
constexpr double kLr = 1e-2;
constexpr double kWeightDecay = 0.1;

// Calls visit("name", &field) for each field; first those of what is computed.
template <typename Spec, typename Visit>
void VisitResult(Spec& spec, const Visit& visit) {
  visit("model", &spec.model);
  visit("steps", &spec.steps);
  visit("accumulation", &spec.accumulation);
  visit("dtype", &spec.dtype);
  visit("fp32_norms", &spec.fp32_norms);
  visit("buffer_dtype", &spec.buffer_dtype);
  visit("reduce_dtype", &spec.reduce_dtype);
  visit("accumulation_mode", &spec.accumulation_mode);
  visit("reduction", &spec.reduction);
  visit("predivide", &spec.predivide);
  visit("clipping", &spec.clipping);
  visit("check_overflow", &spec.check_overflow);
  visit("loss_scale", &spec.loss_scale);
  visit("initial_scale_power", &spec.initial_scale_power);
  visit("loss_scale_window", &spec.loss_scale_window);
  visit("hysteresis", &spec.hysteresis);
  visit("min_loss_scale", &spec.min_loss_scale);
  visit("gradients", &spec.gradients);
  visit("outcomes", &spec.outcomes);
}

template <typename Spec, typename Visit>
void VisitWay(Spec& spec, const Visit& visit) {
  visit("stage", &spec.stage);
  visit("overlap", &spec.overlap);
  visit("reshard", &spec.reshard);
  visit("prefetch_bucket_size", &spec.prefetch_bucket_size);
  visit("param_persistence_threshold", &spec.param_persistence_threshold);
  visit("max_live_parameters", &spec.max_live_parameters);
  visit("max_reuse_distance", &spec.max_reuse_distance);
  visit("live_units", &spec.live_units);
  visit("poison", &spec.poison);
}

// Adds "name=value".
struct AddField {
  std::vector<std::string>* fields;
  void operator()(const char* name, const std::string* value) const {
    fields->push_back(absl::StrCat(name, "=", *value));
  }
  void operator()(const char* name, const double* value) const {
    fields->push_back(absl::StrCat(name, "=", HexFloat(*value)));
  }
  template <typename T>
  void operator()(const char* name, const T* value) const {
    fields->push_back(absl::StrCat(name, "=", int64_t{*value}));
  }
};

// Sets a field to its value, if it has one, and takes that away.
struct TakeField {
  std::map<std::string, std::string>* fields;
  template <typename T>
  void operator()(const char* name, T* value) const {
    auto field = fields->find(name);
    if (field == fields->end()) return;
    TORCH_CHECK(Parse(field->second, value), "TrainingSpec: ", name, "=",
                field->second);
    fields->erase(field);
  }

 private:
  static bool Parse(const std::string& text, std::string* value) {
    *value = text;
    return true;
  }
  static bool Parse(const std::string& text, bool* value) {
    return absl::SimpleAtob(text, value);
  }
  static bool Parse(const std::string& text, double* value) {
    const absl::StatusOr<double> parsed = ParseHexDouble(text);
    if (parsed.ok()) *value = *parsed;
    return parsed.ok();
  }
  template <typename T>
  static bool Parse(const std::string& text, T* value) {
    return absl::SimpleAtoi(text, value);
  }
};

std::optional<at::ScalarType> DtypeOf(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "fp32") return at::kFloat;
  if (name == "bf16") return at::kBFloat16;
  TORCH_CHECK(name == "fp16", "no dtype ", name);
  return at::kHalf;
}

std::string OutcomeLine(int step, const Oracle::Outcome& outcome) {
  const std::string scale = HexFloat(outcome.scale);
  if (outcome.skipped) {
    return absl::StrCat("step ", step, ": skipped, scale ", scale);
  }
  return absl::StrCat("step ", step, ": scale ", scale, ", norm ",
                      HexFloat(outcome.norm));
}

std::vector<Record> RecordOracle(const TrainingSpec& spec, int world_size) {
  Oracle oracle([&] { return MakeTestModel(spec.model); },
                OracleOptionsOf(spec, world_size));
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
        records[r].push_back(LossLine(step, i, losses[r][i]));
      }
    }
    if (spec.outcomes) add_to_all(OutcomeLine(step, oracle.outcome()));
    if (!spec.gradients) continue;
    for (const std::string& name : oracle.parameter_names()) {
      add_to_all(absl::StrCat("step ", step, ": gradient of ", name, " ",
                              PrintOf(oracle.gradient(name))));
    }
  }
  for (const std::string& line : ParametersOf(oracle)) add_to_all(line);
  for (int r = 0; r < world_size; ++r) {
    AddState(oracle.module(r), oracle.generator_state(r), &records[r]);
  }
  return records;
}

TESSERA_RANK_FUNCTION(Train) {
  TESSERA_ASSIGN_OR_RETURN(
      Record record,
      TrainWithEngine(TrainingSpec::FromText(args), world.communicator()));
  return ToText(record);
}

// Names of distinct parameters, as the oracle has them.
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

std::string TrainingSpec::ToText() const {
  const TrainingSpec defaults;
  std::vector<std::string> fields, same, changed;
  VisitResult(*this, AddField{&fields});
  VisitWay(*this, AddField{&fields});
  VisitResult(defaults, AddField{&same});
  VisitWay(defaults, AddField{&same});
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i] != same[i]) changed.push_back(fields[i]);
  }
  return absl::StrJoin(changed, " ");
}

TrainingSpec TrainingSpec::FromText(absl::string_view text) {
  std::map<std::string, std::string> fields;
  for (absl::string_view field :
       absl::StrSplit(text, ' ', absl::SkipWhitespace())) {
    fields.insert(absl::StrSplit(field, absl::MaxSplits('=', 1)));
  }
  TrainingSpec spec;
  VisitResult(spec, TakeField{&fields});
  VisitWay(spec, TakeField{&fields});
  TORCH_CHECK(fields.empty(), "not a field of TrainingSpec: ",
              fields.empty() ? "" : fields.begin()->first);
  return spec;
}

std::shared_ptr<TestModel> BuildModel(absl::string_view name, int rank) {
  at::set_num_threads(1);  // as the oracle
  torch::manual_seed(kModelSeed);
  auto model = MakeTestModel(name);
  torch::manual_seed(kRankSeed + static_cast<uint64_t>(rank));
  return model;
}

proto::Config ConfigOf(const TrainingSpec& spec) {
  proto::Config config;
  config.set_train_micro_batch_size_per_gpu(1);
  config.set_gradient_accumulation_steps(spec.accumulation);
  config.set_gradient_clipping(spec.clipping);
  config.mutable_zero_optimization()->set_stage(spec.stage);
  config.mutable_optimizer()->set_type("AdamW");
  config.mutable_optimizer()->mutable_params()->set_lr(kLr);
  config.mutable_optimizer()->mutable_params()->set_weight_decay(kWeightDecay);
  return config;
}

OracleOptions OracleOptionsOf(const TrainingSpec& spec, int world_size) {
  OracleOptions options;
  options.world_size = world_size;
  options.accumulation = spec.accumulation;
  options.model_seed = kModelSeed;
  options.rank_seed = kRankSeed;
  options.lr = kLr;
  options.weight_decay = kWeightDecay;
  if (spec.dtype != "fp32") options.dtype = DtypeOf(spec.dtype);
  options.keep_norms = spec.fp32_norms;
  options.buffer_dtype = DtypeOf(spec.buffer_dtype);
  options.reduce_dtype = DtypeOf(spec.reduce_dtype);
  options.accumulate_locally = spec.accumulation_mode == "local";
  options.sum = spec.reduction == "sum";
  options.predivide = spec.predivide;
  options.max_norm = spec.clipping;
  if (spec.dtype == "bf16") options.skip_overflows = spec.check_overflow;
  if (spec.dtype == "fp16") {
    LossScaling& scaling = options.loss_scaling.emplace();
    scaling.dynamic = spec.loss_scale == 0;
    scaling.scale = scaling.dynamic ? std::ldexp(1, spec.initial_scale_power)
                                    : spec.loss_scale;
    scaling.window = spec.loss_scale_window;
    scaling.hysteresis = spec.hysteresis;
    scaling.min_scale = spec.min_loss_scale;
  }
  return options;
}

absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(
    std::shared_ptr<torch::nn::Module> model, const TrainingSpec& spec,
    std::shared_ptr<Communicator> comm) {
  EngineOptions options;
  options.communicator = std::move(comm);
  options.live_units = spec.live_units;
  return Engine::Create(std::move(model), ConfigOf(spec), options);
}

absl::Status TrainSteps(Engine& engine, TestModel& model,
                        const TrainingSpec& spec, int rank, int first,
                        Record* record) {
  for (int step = first; step < spec.steps; ++step) {
    for (int i = 0; i < spec.accumulation; ++i) {
      at::Tensor loss = model.Loss(rank, step * spec.accumulation + i);
      TESSERA_RETURN_IF_ERROR(engine.Backward(loss));
      record->push_back(LossLine(step, i, loss));
      if (i + 1 < spec.accumulation) TESSERA_RETURN_IF_ERROR(engine.Step());
    }
    for (const std::string& name : ParameterNames(model)) {
      if (!spec.gradients) break;
      TESSERA_ASSIGN_OR_RETURN(at::Tensor gradient, engine.Gradient(name));
      record->push_back(absl::StrCat("step ", step, ": gradient of ", name, " ",
                                     PrintOf(gradient)));
    }
    TESSERA_RETURN_IF_ERROR(engine.Step());
  }
  return absl::OkStatus();
}

absl::Status AddFinalState(Engine& engine, const TestModel& model,
                           Record* record) {
  TESSERA_ASSIGN_OR_RETURN(Record parameters, ParametersOf(engine, model));
  record->insert(record->end(), parameters.begin(), parameters.end());
  AddState(model, at::detail::getDefaultCPUGenerator().get_state(), record);
  return absl::OkStatus();
}

absl::StatusOr<Record> TrainWithEngine(const TrainingSpec& spec,
                                       std::shared_ptr<Communicator> comm) {
  const int rank = comm->rank();
  SetPoisonOnFree(spec.poison);
  auto model = BuildModel(spec.model, rank);
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, spec, std::move(comm)));
  Record record;
  TESSERA_RETURN_IF_ERROR(
      TrainSteps(*engine, *model, spec, rank, /*first=*/0, &record));
  TESSERA_RETURN_IF_ERROR(AddFinalState(*engine, *model, &record));
  TESSERA_ASSIGN_OR_RETURN(Record parameters, ParametersOf(*engine, *model));
  TESSERA_RETURN_IF_ERROR(engine->Close());
  Record closed;
  for (const std::string& name : ParameterNames(*model)) {
    closed.push_back(ParameterLine(name, model->named_parameters()[name]));
  }
  const std::string difference = FirstDifference(parameters, closed);
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
  std::vector<std::string> result = {absl::StrCat("W", world_size)};
  VisitResult(spec, AddField{&result});
  auto [it, absent] = records->try_emplace(absl::StrJoin(result, " "));
  if (absent) it->second = RecordOracle(spec, world_size);
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
  const at::Tensor dense = tensor.detach().contiguous();
  return absl::StrFormat("[%s] %s %016x", absl::StrJoin(dense.sizes(), ", "),
                         c10::toString(dense.scalar_type()),
                         Fingerprint(dense.const_data_ptr(),
                                     static_cast<int64_t>(dense.nbytes())));
}

}  // namespace tessera
