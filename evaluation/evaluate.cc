#include "evaluation/evaluate.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <optional>
#include <utility>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/all_gather_values.h"
#include "comm/communicator.h"
#include "engine/engine.h"
#include "engine/observe/monitor.h"

namespace tessera {
namespace {

constexpr char kWhere[] = "Evaluate";

class OneThreadScope {
 public:
  OneThreadScope() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  ~OneThreadScope() { at::set_num_threads(before_); }
  OneThreadScope(const OneThreadScope&) = delete;
  OneThreadScope& operator=(const OneThreadScope&) = delete;

 private:
  const int before_;
};

// Returns a batch's sizes and dtypes as numbers: for each tensor the type of
// its device, its dtype, its dimensions and their sizes. Empty without a batch.
absl::StatusOr<std::vector<int64_t>> ShapesOf(
    const std::vector<at::Tensor>& batch) {
  std::vector<int64_t> shapes;
  for (const at::Tensor& tensor : batch) {
    if (!tensor.defined()) {
      return absl::InvalidArgumentError(
          "a batch of EvaluateBatches has a tensor that is not defined");
    }
    shapes.push_back(static_cast<int64_t>(tensor.device().type()));
    shapes.push_back(static_cast<int64_t>(tensor.scalar_type()));
    shapes.push_back(tensor.dim());
    shapes.insert(shapes.end(), tensor.sizes().begin(), tensor.sizes().end());
  }
  return shapes;
}

// Zeros, since they are valid as tokens, labels and indices.
std::vector<at::Tensor> ZerosOf(const std::vector<int64_t>& shapes) {
  std::vector<at::Tensor> batch;
  for (size_t i = 0; i < shapes.size();) {
    const auto type = static_cast<at::DeviceType>(shapes[i]);
    const auto dtype = static_cast<at::ScalarType>(shapes[i + 1]);
    const auto dim = static_cast<size_t>(shapes[i + 2]);
    batch.push_back(
        at::zeros(at::IntArrayRef(&shapes[i] + 3, dim),
                  at::TensorOptions(at::Device(type)).dtype(dtype)));
    i += 3 + dim;
  }
  return batch;
}

}  // namespace

// One evaluation, from the scopes around it to the metrics.
class Evaluation {
 public:
  Evaluation(Engine* engine, const std::vector<Metric*>& metrics,
             const EvaluateOptions& options)
      : engine_(engine),
        comm_(engine->communicator().get()),
        counts_(engine->pipeline_stage() == 0 &&
                comm_->rank() %
                        (comm_->world_size() / engine->data_world_size() /
                         engine->pipeline_stages()) ==
                    0),
        metrics_(metrics),
        options_(options) {}

  // Runs `rounds`, which calls Forward, under the scopes.
  absl::Status Run(absl::string_view what,
                   absl::FunctionRef<absl::Status()> rounds) {
    std::vector<std::string> names;
    for (const Metric* metric : metrics_) names.push_back(metric->name());
    TESSERA_RETURN_IF_ERROR(comm_->AgreeEqual(
        absl::StrCat(what, ", averages ", options_.averages, ", one_thread ",
                     options_.one_thread, ", metrics ",
                     absl::StrJoin(names, ", ")),
        "evaluation"));
    for (Metric* metric : metrics_) metric->Reset();
    TESSERA_RETURN_IF_ERROR(Scoped(rounds));
    TESSERA_RETURN_IF_ERROR(ReduceMetrics(comm_, metrics_));
    if (options_.tag.empty()) return absl::OkStatus();
    for (const Metric* metric : metrics_) {
      engine_->monitor().AddScalar(
          absl::StrCat(options_.tag, "/", metric->name()), metric->value());
    }
    return absl::OkStatus();
  }

  // Makes one forward, on all ranks; returns the error of any. What is added
  // counts if `counts`.
  absl::Status Forward(bool counts, absl::FunctionRef<absl::Status()> add) {
    for (Metric* metric : metrics_) metric->counts_ = counts && counts_;
    const absl::Status mine = CatchTorch(kWhere, [&] {
      const AutocastScope autocast(engine_);
      return add();
    });
    for (Metric* metric : metrics_) metric->counts_ = true;
    return eval_->Agree(mine);
  }

  Communicator* comm() const { return comm_; }

 private:
  absl::Status Scoped(absl::FunctionRef<absl::Status()> rounds) {
    std::optional<OneThreadScope> one_thread;
    if (options_.one_thread) one_thread.emplace();
    std::optional<AveragesScope> averages;
    if (options_.averages) {
      TESSERA_ASSIGN_OR_RETURN(AveragesScope opened,
                               AveragesScope::Open(engine_));
      averages.emplace(std::move(opened));
    }
    {
      EvalScope eval(engine_);
      eval_ = &eval;
      TESSERA_RETURN_IF_ERROR(rounds());
    }
    return averages.has_value() ? averages->Close() : absl::OkStatus();
  }

  Engine* const engine_;
  Communicator* const comm_;
  // The ranks of a tensor-parallel group, and of a pipeline, have the same
  // samples: one of them counts.
  const bool counts_;
  const std::vector<Metric*>& metrics_;
  const EvaluateOptions& options_;
  EvalScope* eval_ = nullptr;  // while rounds run
};

absl::Status Evaluate(Engine* engine, const std::vector<Metric*>& metrics,
                      int64_t num_samples, const AddSamples& add,
                      const EvaluateOptions& options) {
  Evaluation evaluation(engine, metrics, options);
  // No larger, so that a round of all ranks cannot overflow.
  const int64_t batch =
      std::min(options.batch_size, std::max<int64_t>(num_samples, 1));
  const auto rounds = [&]() -> absl::Status {
    if (num_samples < 1 || batch < 1) {
      return absl::FailedPreconditionError(absl::StrCat(
          "Evaluate: expected samples and a batch_size, got ", num_samples,
          " samples in batches of ", options.batch_size));
    }
    const int64_t ranks = engine->data_world_size();
    const int64_t round = batch * ranks;
    for (int64_t first = 0; first < num_samples; first += round) {
      int64_t begin = first + batch * engine->data_rank();
      const bool counts = begin < num_samples;
      if (!counts) begin = 0;
      std::vector<int64_t> samples(
          static_cast<size_t>(std::min(batch, num_samples - begin)));
      std::iota(samples.begin(), samples.end(), begin);
      TESSERA_RETURN_IF_ERROR(
          evaluation.Forward(counts, [&] { return add(samples); }));
    }
    return absl::OkStatus();
  };
  return evaluation.Run(
      absl::StrCat(num_samples, " samples in batches of ", options.batch_size),
      rounds);
}

absl::Status EvaluateBatches(Engine* engine,
                             const std::vector<Metric*>& metrics,
                             const NextBatch& next, const AddBatch& add,
                             const EvaluateOptions& options) {
  Evaluation evaluation(engine, metrics, options);
  Communicator* const comm = evaluation.comm();
  const auto rounds = [&]() -> absl::Status {
    std::vector<at::Tensor> last;
    bool ended = false;
    for (int64_t round = 0;; ++round) {
      absl::StatusOr<std::vector<at::Tensor>> batch = std::vector<at::Tensor>();
      if (!ended) batch = CatchTorch("the next batch", next);
      absl::StatusOr<std::vector<int64_t>> mine = std::vector<int64_t>();
      if (batch.ok()) {
        mine = ShapesOf(*batch);
      } else {
        mine = batch.status();
      }
      TESSERA_RETURN_IF_ERROR(comm->AgreeOk(mine.status(), kWhere));
      ended = batch->empty();
      TESSERA_ASSIGN_OR_RETURN(
          const std::vector<std::vector<int64_t>> shapes,
          AllGatherLists(comm, *mine, CommTag{"batches left"}));
      const auto has = std::find_if(shapes.begin(), shapes.end(),
                                    [](const auto& s) { return !s.empty(); });
      if (has == shapes.end()) {
        if (round > 0) return absl::OkStatus();
        return absl::FailedPreconditionError("Evaluate: no rank has a batch");
      }
      if (!ended) last = *std::move(batch);
      TESSERA_RETURN_IF_ERROR(evaluation.Forward(!ended, [&] {
        if (last.empty()) last = ZerosOf(*has);
        return add(last);
      }));
    }
  };
  return evaluation.Run("batches of each rank", rounds);
}

}  // namespace tessera
