// Evaluate: runs forwards over a set of samples on all ranks, and computes
// metrics of them.
//
//   tessera::Mean loss("loss");
//   tessera::Accuracy accuracy;
//   TESSERA_RETURN_IF_ERROR(tessera::Evaluate(
//       engine.get(), {&loss, &accuracy}, test.num_images(),
//       [&](absl::Span<const int64_t> samples) -> absl::Status {
//         const auto [images, labels] = test.Load(samples);
//         const at::Tensor logits = model->forward(images);
//         loss.Add(CrossEntropyOfEach(logits, labels));
//         accuracy.Add(logits, labels);
//         return absl::OkStatus();
//       }));
//   if (world->rank() == 0) printf("%f %f", loss.value(), accuracy.value());
//
// Each sample counts once, at any world size: nothing is padded. Batch b has
// the samples [b * batch_size, (b + 1) * batch_size) at every world size, and
// rank r of W takes the batches r, r + W, ... So a forward has the same bits at
// every world size if its kernels give the same bits with each number of
// threads (EvaluateOptions::one_thread), and so have the metrics, whose sums
// are exact.
//
// Where gathers are collectives (stage 3, engine/engine.h) all ranks have to
// make the same forwards. So all ranks call the function equally often: one
// that has run out of batches gets one again, and its metrics drop what is
// added. The program decides what else the function does with such a batch.
//
// The function is called under an EvalScope (evaluation mode, no gradients) and
// an AutocastScope (engine/engine_scopes.h), which end with the call: modes,
// gradients, autocast, threads, averages and parameters are then as before.
#ifndef EVALUATION_EVALUATE_H_
#define EVALUATION_EVALUATE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evaluation/metric.h"  // IWYU pragma: export

namespace tessera {

class Engine;  // engine/engine.h

// Options are identical on all ranks.
struct EvaluateOptions {
  // Samples of a forward; the last batch of all may have fewer. Evaluate only.
  int64_t batch_size = 1;
  // Evaluates the averages (Engine::SwapInAverages) and swaps them out again.
  bool averages = false;
  // Runs libtorch's operators on one thread. Some kernels sum in another order
  // with another number of threads, and ranks of one host share its processors,
  // so the number depends on the world size.
  bool one_thread = false;
  // Where this is not empty, each metric is added to the engine's Monitor as
  // "TAG/NAME".
  std::string tag;
};

// Runs the forward of some samples and adds its results to the metrics.
using AddSamples =
    std::function<absl::Status(absl::Span<const int64_t> samples)>;
// Runs the forward of a batch and adds its results to the metrics.
using AddBatch =
    std::function<absl::Status(const std::vector<at::Tensor>& batch)>;
// Returns this rank's next batch; empty: this rank has no more.
using NextBatch = std::function<absl::StatusOr<std::vector<at::Tensor>>()>;

// Evaluates samples 0 to `num_samples` - 1: resets the metrics, calls `add`
// until each sample was in one batch, and computes the metrics over all ranks.
// The metrics live on all ranks, in the same order. COLLECTIVE, blocking; an
// agreement of the ranks per batch.
//
// An error that `add` returns or throws on one rank (as CatchTorch maps it) is
// returned on all, naming the rank; where gathers are collectives the engine
// has to be given up then (EvalScope::Agree). FailedPrecondition: no samples,
// or averages that are not kept; InvalidArgument: options, numbers or metrics
// that differ between ranks.
absl::Status Evaluate(Engine* engine, const std::vector<Metric*>& metrics,
                      int64_t num_samples, const AddSamples& add,
                      const EvaluateOptions& options = {});

// Evaluates batches that each rank has of its own; their numbers may differ,
// and some ranks may have none. A rank that has run out gets its last batch
// again, whose results do not count; one that never had a batch gets zeros of
// the sizes and dtypes of another rank's. Errors of `next` are returned on all
// ranks before a forward; the others are Evaluate's. COLLECTIVE, blocking; two
// agreements of the ranks per batch.
absl::Status EvaluateBatches(Engine* engine,
                             const std::vector<Metric*>& metrics,
                             const NextBatch& next, const AddBatch& add,
                             const EvaluateOptions& options = {});

}  // namespace tessera
#endif  // EVALUATION_EVALUATE_H_
