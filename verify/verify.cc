#include "verify/verify.h"

#include <torch/torch.h>

#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/capabilities.h"
#include "comm/world/world.h"
#include "config/config.h"
#include "nn/sync_batch_norm.h"
#include "parallel/tensor/placed.h"
#include "verify/difference.h"
#include "verify/engine_groups.h"
#include "verify/oracle_options.h"
#include "verify/plain/plain_autocast.h"

namespace tessera {
namespace {

at::Generator DefaultGenerator() {
  return at::detail::getDefaultCPUGenerator();
}

// Restores the caller's thread count and generator at the end.
class KeepTorchState {
 public:
  KeepTorchState()
      : threads_(at::get_num_threads()),
        generator_(DefaultGenerator().get_state()) {
    at::set_num_threads(1);  // as in the oracle
  }
  ~KeepTorchState() {
    at::set_num_threads(threads_);
    DefaultGenerator().set_state(generator_);
  }

 private:
  const int threads_;
  const at::Tensor generator_;
};

using Tensors = absl::flat_hash_map<std::string, at::Tensor>;

class Verifier {
 public:
  Verifier(proto::Config config, const Oracle::Loss& loss,
           const VerifyOptions& options, std::shared_ptr<Communicator> comm)
      : config_(std::move(config)),
        loss_(loss),
        options_(options),
        comm_(std::move(comm)),
        exact_(
            options.exact.value_or(comm_->capabilities().sums_in_rank_order)) {}

  absl::StatusOr<VerifyReport> Run(const Oracle::MakeModule& make) {
    TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(
        CatchTorch("Verify", [&] { return Start(make); }), "Verify"));
    TESSERA_ASSIGN_OR_RETURN(engine_,
                             Engine::Create(module_, config_, options_.engine));
    TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(
        CatchTorch("Verify", [&] { return MakeOracle(make); }), "Verify"));
    for (step_ = 0; step_ < options_.steps; ++step_) {
      TESSERA_RETURN_IF_ERROR(Step());
    }
    TESSERA_RETURN_IF_ERROR(engine_->Close());
    TESSERA_ASSIGN_OR_RETURN(
        const auto values, comm_->AllGatherStrings(absl::StrCat(report_.values),
                                                   CommTag{"Verify"}));
    report_.values = std::stoll(values[0]);
    report_.steps = options_.steps;
    report_.exact = exact_;
    return report_;
  }

 private:
  absl::Status Start(const Oracle::MakeModule& make);
  absl::Status MakeOracle(const Oracle::MakeModule& make);
  absl::Status Step();
  absl::Status TrainStep();
  absl::Status CompareOnRank0(const std::vector<std::string>& lines);
  absl::Status CompareGradient(const std::string& name);
  absl::Status CompareMaster(const std::string& name);
  absl::Status CompareOutcome() const;
  absl::StatusOr<std::string> LinesOf(const torch::nn::Module& module,
                                      const std::vector<at::Tensor>& losses,
                                      const at::Tensor& generator) const;
  at::Tensor LossUnderAutocast(torch::nn::Module& module, int rank,
                               int64_t micro_batch) const;
  int data_rank() const { return DataRank(comm_->rank()); }
  int DataRank(int rank) const {
    return rank % (comm_->world_size() / PipelineRanksOf(config_)) /
           (TensorRanksOf(config_) * SequenceRanksOf(config_));
  }
  std::string Where() const {
    return absl::StrCat("step ", step_, " of ", options_.steps);
  }

  const proto::Config config_;
  const Oracle::Loss& loss_;
  const VerifyOptions& options_;
  const std::shared_ptr<Communicator> comm_;
  const bool exact_;
  std::shared_ptr<torch::nn::Module> module_;
  std::unique_ptr<Engine> engine_;
  std::vector<std::string> names_;  // of distinct parameters
  std::optional<Oracle> oracle_;    // on rank 0
  VerifyReport report_;
  // Values of the step on this rank; only rank 0 keeps whole tensors.
  int step_ = 0;
  std::vector<at::Tensor> losses_;
  Tensors gradients_, masters_;
};

absl::Status Verifier::Start(const Oracle::MakeModule& make) {
  TESSERA_RETURN_IF_ERROR(
      OracleOptionsOf(config_, comm_->world_size(), /*stage=*/0).status());
  torch::manual_seed(options_.seed);
  module_ = make();
  torch::manual_seed(options_.seed + 1 + static_cast<uint64_t>(data_rank()));
  if (module_ == nullptr) {
    return absl::InvalidArgumentError("Verify: `make` returned no module");
  }
  for (const auto& m : module_->named_modules()) {
    if (comm_->world_size() == 1 || !IsSyncBatchNorm(*m.value())) continue;
    return absl::UnimplementedError(absl::StrCat(
        "Verify: '", m.key(),
        "' is a SyncBatchNorm, which plain training in one process cannot be "
        "compared with: it has one rank's batch after the other. Verify the "
        "model with torch::nn::BatchNorm in its place"));
  }
  absl::flat_hash_map<const void*, std::string> seen;
  for (const auto& p : module_->named_parameters()) {
    const bool first =
        seen.try_emplace(p.value().unsafeGetTensorImpl(), p.key()).second;
    if (first && p.value().numel() > 0) names_.push_back(p.key());
  }
  report_.parameters = static_cast<int64_t>(names_.size());
  return absl::OkStatus();
}

absl::Status Verifier::MakeOracle(const Oracle::MakeModule& make) {
  if (comm_->rank() != 0) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(
      OracleOptions oracle,
      OracleOptionsOf(config_, comm_->world_size(), engine_->stage()));
  TESSERA_RETURN_IF_ERROR(AddGroups(options_.engine.param_groups, &oracle));
  oracle.model_seed = options_.seed;
  oracle.rank_seed = options_.seed + 1;
  oracle.weight = options_.weight;
  oracle.roundings = !exact_;
  for (const TensorCut& cut : engine_->tensor_cuts()) {
    oracle.tensor_cuts.push_back({cut.parameter, cut.dim, cut.groups});
  }
  oracle_.emplace(make, oracle);
  return absl::OkStatus();
}

absl::Status Verifier::TrainStep() {
  const auto micro_batches =
      static_cast<int>(config_.gradient_accumulation_steps());
  const int64_t first = static_cast<int64_t>(step_) * micro_batches;
  BatchOptions options;
  for (int i = 0; options_.weight && i < micro_batches; ++i) {
    options.weights.push_back(options_.weight(data_rank(), first + i));
  }
  TESSERA_ASSIGN_OR_RETURN(
      losses_, engine_->BackwardBatch(
                   [&](int64_t i) {
                     const Engine::AutocastScope autocast(engine_.get());
                     return loss_(*module_, data_rank(), first + i);
                   },
                   options));
  for (const std::string& name : names_) {
    TESSERA_ASSIGN_OR_RETURN(at::Tensor gradient, engine_->Gradient(name));
    if (comm_->rank() == 0) gradients_[name] = std::move(gradient);
  }
  TESSERA_RETURN_IF_ERROR(engine_->Step());
  for (const std::string& name : names_) {
    TESSERA_ASSIGN_OR_RETURN(at::Tensor master, engine_->Master(name));
    if (comm_->rank() == 0) masters_[name] = std::move(master);
  }
  return absl::OkStatus();
}

absl::Status Verifier::Step() {
  absl::Status trained = CatchTorch("Verify", [&] { return TrainStep(); });
  if (!trained.ok()) comm_->Announce(trained);
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(trained, "Verify"));
  const auto mine = CatchTorch("Verify", [&] {
    return LinesOf(*module_, losses_, DefaultGenerator().get_state());
  });
  TESSERA_RETURN_IF_ERROR(comm_->AgreeOk(mine.status(), "Verify"));
  TESSERA_ASSIGN_OR_RETURN(const auto all,
                           comm_->AllGatherStrings(*mine, CommTag{"Verify"}));
  absl::Status equal;
  if (comm_->rank() == 0) {
    equal = CatchTorch("Verify", [&] { return CompareOnRank0(all); });
  }
  return comm_->AgreeOk(equal, "Verify");
}

absl::Status Verifier::CompareOnRank0(const std::vector<std::string>& lines) {
  // A schedule's rates come from the engine, others from the configuration.
  if (config_.has_scheduler()) {
    for (const StepReport::Group& group : engine_->last_step().groups) {
      oracle_->SetLearningRate(group.name, group.learning_rate);
    }
  }
  const auto losses = oracle_->TrainStep(
      [this](torch::nn::Module& module, int rank, int64_t micro_batch) {
        return LossUnderAutocast(module, rank, micro_batch);
      });
  for (const std::string& name : names_) {
    TESSERA_RETURN_IF_ERROR(CompareGradient(name));
  }
  TESSERA_RETURN_IF_ERROR(CompareOutcome());
  for (const std::string& name : names_) {
    TESSERA_RETURN_IF_ERROR(CompareMaster(name));
  }
  for (int r = 0; r < comm_->world_size(); ++r) {
    TESSERA_ASSIGN_OR_RETURN(const std::string expected,
                             LinesOf(oracle_->module(DataRank(r)),
                                     losses[static_cast<size_t>(DataRank(r))],
                                     oracle_->generator_state(DataRank(r))));
    const std::string difference =
        FirstLineThatDiffers(expected, lines[static_cast<size_t>(r)]);
    if (difference.empty()) continue;
    return absl::DataLossError(
        absl::StrCat(Where(), ", on rank ", r, ": ", difference));
  }
  return absl::OkStatus();
}

absl::Status Verifier::CompareGradient(const std::string& name) {
  at::Tensor expected = oracle_->gradient(name);
  const double inverse = 1 / oracle_->outcome().divisor;
  if (expected.defined() && inverse != 1) expected = expected.mul(inverse);
  const at::Tensor& got = gradients_[name];
  std::string difference;
  if (exact_ || !expected.defined() || !got.defined()) {
    difference = DifferenceOf(expected, got);
  } else {
    difference = DifferenceBeyond(
        expected, got, oracle_->rounding(name).mul(inverse),
        comm_->world_size() + config_.gradient_accumulation_steps());
  }
  if (expected.defined()) report_.values += expected.numel();
  if (difference.empty()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const std::string unit, engine_->UnitOf(name));
  return absl::DataLossError(absl::StrCat(Where(), ": gradient of parameter '",
                                          name, "' (unit ", unit,
                                          "): ", difference));
}

absl::Status Verifier::CompareMaster(const std::string& name) {
  // A frozen parameter keeps what its working dtype can hold; see the lines.
  if (!module_->named_parameters()[name].requires_grad()) {
    return absl::OkStatus();
  }
  if (!exact_) {
    oracle_->SetMaster(name, masters_[name]);
    return absl::OkStatus();
  }
  const at::Tensor expected = oracle_->master(name);
  report_.values += expected.numel();
  const std::string difference =
      DifferenceOf(expected, masters_[name].to(expected.scalar_type()));
  if (difference.empty()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(const std::string unit, engine_->UnitOf(name));
  return absl::DataLossError(absl::StrCat(Where(), ": master of parameter '",
                                          name, "' (unit ", unit,
                                          ") after the step: ", difference));
}

absl::Status Verifier::CompareOutcome() const {
  const StepReport& got = engine_->last_step();
  const Oracle::Outcome& expected = oracle_->outcome();
  if (got.skipped != expected.skipped || got.loss_scale != expected.scale) {
    return absl::DataLossError(
        absl::StrCat(Where(), ": ", got.skipped ? "skipped" : "made",
                     ", loss scale ", got.loss_scale, "; plain training ",
                     expected.skipped ? "skips it" : "makes it",
                     ", loss scale ", expected.scale));
  }
  const bool has_norm = !std::isnan(got.grad_norm) && !got.skipped;
  if (!exact_ || !has_norm || got.grad_norm == expected.norm) {
    return absl::OkStatus();
  }
  return absl::DataLossError(
      absl::StrCat(Where(), ": norm of the gradients ", HexFloat(got.grad_norm),
                   ", plain training has ", HexFloat(expected.norm),
                   ", although all gradients are equal"));
}

// Describes what belongs to a rank: losses, what operators compute with,
// buffers, generator.
absl::StatusOr<std::string> Verifier::LinesOf(
    const torch::nn::Module& module, const std::vector<at::Tensor>& losses,
    const at::Tensor& generator) const {
  torch::NoGradGuard no_grad;
  std::string lines;
  for (size_t i = 0; i < losses.size(); ++i) {
    absl::StrAppend(&lines, "loss of micro-batch ", i, ": ",
                    losses[i].defined()
                        ? HexFloat(losses[i].to(at::kDouble).item<double>())
                        : "none",
                    "\n");
  }
  const auto parameters = module.named_parameters();
  for (const std::string& name : names_) {
    at::Tensor value;
    if (&module == module_.get()) {
      TESSERA_ASSIGN_OR_RETURN(value, engine_->Parameter(name));
    } else {
      value = PartOrSelf(parameters[name]).is_same(parameters[name])
                  ? parameters[name]
                  : oracle_->parameter(name);
    }
    absl::StrAppend(&lines, "working copy of parameter '", name,
                    "': ", PrintOfValues(value), "\n");
  }
  for (const auto& b : module.named_buffers()) {
    absl::StrAppend(&lines, "buffer '", b.key(),
                    "': ", PrintOfValues(b.value()), "\n");
  }
  absl::StrAppend(&lines, "generator: ", PrintOfValues(generator), "\n");
  return lines;
}

at::Tensor Verifier::LossUnderAutocast(torch::nn::Module& module, int rank,
                                       int64_t micro_batch) const {
  std::optional<PlainAutocast> autocast;
  if (config_.torch_autocast().enabled()) {
    autocast.emplace(config_.torch_autocast().dtype() == "float16"
                         ? at::kHalf
                         : at::kBFloat16);
  }
  return loss_(module, rank, micro_batch);
}

absl::StatusOr<std::shared_ptr<Communicator>> GroupOf(
    const VerifyOptions& options) {
  if (options.engine.communicator != nullptr) {
    return options.engine.communicator;
  }
  if (World::Current() != nullptr) return World::Current()->communicator();
  return absl::FailedPreconditionError(
      "Verify: call tessera::Init first, or set EngineOptions::communicator");
}

}  // namespace

std::string VerifyReport::ToString() const {
  return absl::StrCat(steps, " steps, ", parameters, " parameters, ", values,
                      " values: ",
                      exact ? "the same bits"
                            : "gradients within the bound of sums in another "
                              "order");
}

absl::StatusOr<VerifyReport> Verify(const Oracle::MakeModule& make,
                                    absl::string_view config_path,
                                    const Oracle::Loss& loss,
                                    const VerifyOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(const auto comm, GroupOf(options));
  const auto config = LoadConfig(std::string(config_path), comm->world_size(),
                                 options.engine.auto_values);
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(config.status(), "configuration"));
  return Verify(make, *config, loss, options);
}

absl::StatusOr<VerifyReport> Verify(const Oracle::MakeModule& make,
                                    const proto::Config& config,
                                    const Oracle::Loss& loss,
                                    const VerifyOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(const auto comm, GroupOf(options));
  auto resolved = ResolveConfig(config, comm->world_size());
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(resolved.status(), "configuration"));
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(
      options.steps > 0
          ? absl::OkStatus()
          : absl::InvalidArgumentError(absl::StrCat(
                "Verify: steps is ", options.steps, "; expected 1 or more")),
      "Verify"));
  const KeepTorchState keep;
  return Verifier(*std::move(resolved), loss, options, comm).Run(make);
}

}  // namespace tessera
