// Metrics over the samples of all ranks: means, accuracy, perplexity.
//
//   tessera::Mean loss("loss");
//   tessera::Accuracy accuracy;
//   loss.Add(losses);               // [B], this rank's, one per sample
//   accuracy.Add(logits, labels);   // [B, classes], [B]
//   tessera::ReduceMetrics(communicator, {&loss, &accuracy});
//   loss.value();                   // over all ranks, identical on all
//
// Evaluate (evaluation/evaluate.h) resets, fills and reduces them.
//
// Sums are exact: the sum of the positive values and that of the negative ones
// are each rounded once, at the end. So a value depends neither on the order in
// which samples are added nor on the rank that adds them, and has the same bits
// at every world size if the samples' own values have.
//
// Tensors may be on any device. Adding does not wait for the device, except
// once in about 10^6 values; ReduceMetrics, State and Load do.
//
// Threads: none; calls of a metric come from one thread at a time.
#ifndef EVALUATION_METRIC_H_
#define EVALUATION_METRIC_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tessera {

class Communicator;  // comm/communicator.h

// Metric: the weighted mean of what was added, and what a class makes of it. A
// program's own metric derives from it and calls AddValues.
class Metric {
 public:
  // `name` is for messages and monitors ("loss").
  explicit Metric(std::string name);
  virtual ~Metric();
  Metric(const Metric&) = delete;
  Metric& operator=(const Metric&) = delete;

  const std::string& name() const { return name_; }
  // Returns the metric over the samples of all ranks, as of the last Evaluate
  // or ReduceMetrics: identical on all ranks. NaN before that, and if no sample
  // was added or one was NaN. LOCAL.
  double value() const { return value_; }
  // Returns the sum of the weights of these samples: without weights their
  // number. LOCAL.
  double weight() const { return weight_; }

  // Drops what this rank has added, and the value. LOCAL.
  void Reset();

  // Returns this rank's sums as one line of text without loss, for a checkpoint
  // within an epoch; Load replaces them. Both wait for the device. DataLoss for
  // text that State did not write. LOCAL.
  std::string State() const;
  absl::Status Load(absl::string_view state);

 protected:
  // Adds values of any shape and real dtype, one sample per element. `weights`,
  // of the same sizes, are finite and not negative; a sample of weight 0 does
  // not count, whatever its value. Undefined: 1 each. Throws StatusException
  // (InvalidArgument) for other sizes or weights. LOCAL.
  void AddValues(const at::Tensor& values, const at::Tensor& weights);
  // Returns the metric of a weighted mean.
  virtual double FromMean(double mean) const { return mean; }

 private:
  friend class Evaluation;  // evaluation/evaluate.cc
  friend absl::Status ReduceMetrics(Communicator* comm,
                                    const std::vector<Metric*>& metrics);
  struct Sums;
  struct Waiting {
    at::Tensor values, weights;  // float64, on a device
  };

  void Drain() const;

  const std::string name_;
  double value_, weight_ = 0;
  bool counts_ = true;          // what is added; else it is dropped
  std::unique_ptr<Sums> sums_;  // this rank's
  mutable std::vector<Waiting> waiting_;
  mutable int64_t waiting_numel_ = 0;
};

// Mean: the mean of numbers, such as a loss per sample.
class Mean : public Metric {
 public:
  explicit Mean(std::string name) : Metric(std::move(name)) {}

  // Adds one sample for each element of `values`: any shape, device and real
  // dtype. `weights` have the same sizes; undefined: 1 each. Throws
  // StatusException (InvalidArgument) for weights that do not fit. LOCAL.
  void Add(const at::Tensor& values, const at::Tensor& weights = {}) {
    AddValues(values, weights);
  }
  // Adds `count` samples by their mean, a tensor of one element. Their product
  // is rounded to float64; that of a float32 and up to 2^29 is exact. LOCAL.
  void AddMean(const at::Tensor& mean, double count);
};

// Accuracy: the part of the samples whose label is among the `top_k` largest
// logits, 0 to 1. Ties count as libtorch's argmax and topk break them.
class Accuracy : public Metric {
 public:
  // `top_k` is at least 1. A label of `ignore_index` does not count.
  explicit Accuracy(std::string name = "accuracy", int64_t top_k = 1,
                    int64_t ignore_index = -100);

  // Adds `logits` [..., classes] and `labels` [...] of int64, on one device.
  // Throws StatusException (InvalidArgument) for sizes that do not fit. LOCAL.
  void Add(const at::Tensor& logits, const at::Tensor& labels);

 private:
  const int64_t top_k_, ignore_index_;
};

// Perplexity: e to the mean loss of a token in nats.
class Perplexity : public Metric {
 public:
  // A target of `ignore_index` does not count in AddLogits.
  explicit Perplexity(std::string name = "perplexity",
                      int64_t ignore_index = -100);

  // Adds the losses of tokens, in nats: as Mean::Add.
  void Add(const at::Tensor& losses, const at::Tensor& weights = {}) {
    AddValues(losses, weights);
  }
  // As Mean::AddMean, for a loss that is a mean over tokens.
  void AddMean(const at::Tensor& mean, double tokens);
  // Adds the cross entropies, computed in float32, of `logits` [..., words] and
  // `targets` [...] of int64. Throws StatusException (InvalidArgument) for
  // sizes that do not fit. LOCAL.
  void AddLogits(const at::Tensor& logits, const at::Tensor& targets);

 protected:
  double FromMean(double mean) const override;

 private:
  const int64_t ignore_index_;
};

// Computes value() and weight() of all metrics over all ranks; what this rank
// has added stays. All ranks give the same metrics in the same order (checked
// by name: InvalidArgument, on all ranks). COLLECTIVE, blocking: one small
// exchange of text.
absl::Status ReduceMetrics(Communicator* comm,
                           const std::vector<Metric*>& metrics);

}  // namespace tessera
#endif  // EVALUATION_METRIC_H_
