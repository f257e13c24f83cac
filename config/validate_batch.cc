#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "config/config.pb.h"
#include "config/defaults.h"
#include "config/validate.h"

namespace tessera {
namespace {

constexpr char kTrain[] = "train_batch_size";
constexpr char kMicro[] = "train_micro_batch_size_per_gpu";
constexpr char kSteps[] = "gradient_accumulation_steps";

class Batch {
 public:
  Batch(int world_size, proto::Config* config, Faults* faults)
      : world_size_(world_size), config_(*config), faults_(*faults) {}

  void Resolve() {
    for (const char* key : {kTrain, kMicro, kSteps}) {
      if (faults_.IsDoubtful(key)) return;
    }
    const bool has_train = config_.has_train_batch_size();
    const bool has_micro = config_.has_train_micro_batch_size_per_gpu();
    if (!has_train && !has_micro) {
      faults_.Add(kTrain, "missing: give it or ", kMicro);
    } else if (!has_train) {
      ResolveTrain();
    } else {
      ResolveFromTrain();
    }
  }

 private:
  // Uses T = M * G * W. Accumulation is 1 unless given.
  void ResolveTrain() {
    const int64_t micro = config_.train_micro_batch_size_per_gpu();
    const int64_t steps = config_.has_gradient_accumulation_steps()
                              ? config_.gradient_accumulation_steps()
                              : 1;
    int64_t train = 0;
    if (__builtin_mul_overflow(micro, steps, &train) ||
        __builtin_mul_overflow(train, int64_t{world_size_}, &train)) {
      faults_.Add(kMicro, micro, " * ", kSteps, " ", steps, " * world size ",
                  world_size_, " is too large");
      return;
    }
    config_.set_gradient_accumulation_steps(steps);
    config_.set_train_batch_size(train);
  }

  // Finds M or G, whichever is absent, or neither.
  void ResolveFromTrain() {
    const bool has_micro = config_.has_train_micro_batch_size_per_gpu();
    if (!has_micro && !config_.has_gradient_accumulation_steps()) {
      config_.set_gradient_accumulation_steps(1);
    }
    const bool has_steps = config_.has_gradient_accumulation_steps();
    const int64_t train = config_.train_batch_size();
    const int64_t micro = config_.train_micro_batch_size_per_gpu();
    const int64_t steps = config_.gradient_accumulation_steps();
    // It divides step by step, since the product might overflow.
    int64_t rest = train;
    bool divides = Divide(rest, world_size_);
    if (has_micro) divides = divides && Divide(rest, micro);
    if (has_steps) divides = divides && Divide(rest, steps);
    if (has_micro && has_steps) divides = divides && rest == 1;
    if (!divides) {
      const auto shown = [](const char* name, bool present, int64_t value) {
        return present ? absl::StrCat(name, " ", value)
                       : absl::StrCat(name, " (absent)");
      };
      faults_.Add(kTrain, "expected ", shown(kMicro, has_micro, micro), " * ",
                  shown(kSteps, has_steps, steps), " * world size ",
                  world_size_, ", got ", train, Nearest());
      return;
    }
    if (!has_micro) config_.set_train_micro_batch_size_per_gpu(rest);
    if (!has_steps) config_.set_gradient_accumulation_steps(rest);
  }

  // Returns "; 32 and 40 would work".
  std::string Nearest() const {
    const bool all = config_.has_train_micro_batch_size_per_gpu() &&
                     config_.has_gradient_accumulation_steps();
    const int64_t micro =
        std::max<int64_t>(config_.train_micro_batch_size_per_gpu(), 1);
    const int64_t steps =
        std::max<int64_t>(config_.gradient_accumulation_steps(), 1);
    int64_t unit = 0;
    if (__builtin_mul_overflow(micro, steps, &unit) ||
        __builtin_mul_overflow(unit, int64_t{world_size_}, &unit)) {
      return "";
    }
    const int64_t train = config_.train_batch_size();
    const int64_t below = train / unit * unit;
    if (all || below == 0) return absl::StrCat("; ", unit, " would work");
    if (below > std::numeric_limits<int64_t>::max() - unit) return "";
    return absl::StrCat("; ", below, " and ", below + unit, " would work");
  }

  static bool Divide(int64_t& value, int64_t divisor) {
    const bool exact = value % divisor == 0;
    value /= divisor;
    return exact;
  }

  const int world_size_;
  proto::Config& config_;
  Faults& faults_;
};

// Returns for how much of a batch a stage is idle, if all take the same time.
int64_t IdlePercent(int64_t stages, int64_t micro_batches) {
  return 100 * (stages - 1) / (micro_batches + stages - 1);
}

}  // namespace

int DataParallelRanks(int world_size, const proto::Config& config,
                      Faults* faults) {
  int ranks = world_size;
  const auto take = [&](const char* key, int64_t each) {
    if (each <= 1) return;
    if (ranks % each == 0) {
      ranks /= static_cast<int>(each);
    } else {
      faults->Add(
          key, "expected a divisor of the world size ", world_size,
          ranks == world_size ? "" : absl::StrCat(" / ", world_size / ranks),
          ", got ", each);
    }
  };
  take("tensor_parallel.autotp_size", config.tensor_parallel().autotp_size());
  take("pipeline.stages", config.pipeline().stages());
  take("sequence_parallel_size", config.sequence_parallel_size());
  return ranks;
}

void ResolveBatch(int data_ranks, proto::Config* config, Faults* faults) {
  Batch(data_ranks, config, faults).Resolve();
}

void ResolvePipeline(proto::Config* config, Faults* faults) {
  if (!config->has_pipeline()) return;
  proto::Pipeline& pipeline = *config->mutable_pipeline();
  FillDefaults(&pipeline);
  faults->CheckNoneEmpty("pipeline.split_points", pipeline.split_points());
  const int64_t stages = pipeline.stages();
  const int points = pipeline.split_points_size();
  if (stages <= 1) {
    if (points == 0) return;
    faults->Note("pipeline.split_points", "has no effect: pipeline.stages is ",
                 stages);
    return;
  }
  if (points > 0 && points != stages - 1) {
    faults->Add("pipeline.split_points",
                "expected pipeline.stages - 1 names, at which the second and "
                "each further stage begins: ",
                stages - 1, ", got ", points);
  }
  // One that does not divide the ranks may be too large to compute with.
  if (faults->IsDoubtful("pipeline.stages")) return;
  if (config->gradient_accumulation_steps() == 1 &&
      !config->auto_micro_batch()) {
    const int64_t enough = 4 * stages;
    faults->Note("pipeline.stages",
                 "gradient_accumulation_steps is 1, so the stages compute one "
                 "at a time: each is idle for ",
                 IdlePercent(stages, 1), " % of a batch, and for ",
                 IdlePercent(stages, enough), " % with ", enough);
  }
}

std::vector<std::string> MissingParallelism(const proto::Config& config) {
  std::vector<std::string> missing;
  const proto::TensorParallel& tensor = config.tensor_parallel();
  const int64_t sequence = config.sequence_parallel_size();
  if (sequence > 1 && tensor.autotp_size() > 1) {
    missing.push_back(absl::StrCat(
        "sequence_parallel_size: ", sequence,
        ": parts of sequences with tensor_parallel.autotp_size above 1"));
  }
  if (sequence > 1 && config.pipeline().stages() > 1) {
    missing.push_back(absl::StrCat("sequence_parallel_size: ", sequence,
                                   ": parts of sequences with pipeline.stages "
                                   "above 1"));
  }
  if (tensor.autotp_size() <= 1) return missing;
  if (tensor.has_partition_config() &&
      tensor.partition_config().json() != "null") {
    missing.push_back(
        "tensor_parallel.partition_config: tp_plan says what is divided");
  }
  if (config.pipeline().stages() > 1) {
    missing.push_back(
        absl::StrCat("pipeline.stages: ", config.pipeline().stages(),
                     ": stages with tensor_parallel.autotp_size above 1"));
  }
  return missing;
}

void ResolveLearningRateScaling(proto::Config* config, Faults* faults) {
  if (!config->has_learning_rate_scaling()) return;
  proto::LearningRateScaling& scaling =
      *config->mutable_learning_rate_scaling();
  if (scaling.has_base_batch_size() && !scaling.has_rule()) {
    faults->Add("learning_rate_scaling.rule",
                "missing: expected linear, sqrt or none");
  }
  FillDefaults(&scaling);
  double factor = 1;
  const bool sqrt = scaling.rule() == "sqrt";
  if (sqrt || scaling.rule() == "linear") {
    if (!scaling.has_base_batch_size()) {
      faults->Add("learning_rate_scaling.base_batch_size",
                  "missing: the rule '", scaling.rule(), "' needs it");
      return;
    }
    if (config->train_batch_size() < 1) return;  // a fault of its own
    factor = static_cast<double>(config->train_batch_size()) /
             static_cast<double>(scaling.base_batch_size());
    if (sqrt) factor = std::sqrt(factor);
  }
  if (scaling.has_factor() && scaling.factor() != factor) {
    faults->Add("learning_rate_scaling.factor", "expected ", factor,
                ", by rule, train_batch_size and base_batch_size, got ",
                scaling.factor(), "; leave it out");
  }
  scaling.set_factor(factor);
}

}  // namespace tessera
