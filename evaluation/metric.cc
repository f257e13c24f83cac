#include "evaluation/metric.h"

#include <cmath>
#include <limits>
#include <utility>

#include "ATen/Functions.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "c10/core/GradMode.h"
#include "comm/communicator.h"
#include "optim/norm/exact_sum.h"

namespace tessera {

// Exact sums take finite numbers that are not negative.
struct Metric::Sums {
  ExactSum positive, negative, weight;
  bool nan = false, above = false, below = false;  // values that are not finite

  void Add(double value, double w) {
    if (w == 0) return;
    weight.Add(w);
    const double product = value * w;
    if (std::isnan(product)) {
      nan = true;
    } else if (std::isinf(product)) {
      (product > 0 ? above : below) = true;
    } else if (product > 0) {
      positive.Add(product);
    } else if (product < 0) {
      negative.Add(-product);
    }
  }

  void Add(const Sums& other) {
    positive.Add(other.positive);
    negative.Add(other.negative);
    weight.Add(other.weight);
    nan |= other.nan;
    above |= other.above;
    below |= other.below;
  }

  double Total() const {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    double total = positive.Round() - negative.Round();
    if (above) total += kInfinity;
    if (below) total -= kInfinity;
    return nan ? std::numeric_limits<double>::quiet_NaN() : total;
  }

  std::string Text() const {
    return absl::StrCat(positive.Text(), " ", negative.Text(), " ",
                        weight.Text(), " ", nan + 2 * above + 4 * below);
  }

  static absl::StatusOr<Sums> Parse(absl::string_view text) {
    const std::vector<absl::string_view> words = absl::StrSplit(text, ' ');
    int flags = 0;
    if (words.size() != 4 || !absl::SimpleAtoi(words[3], &flags) || flags < 0 ||
        flags > 7) {
      return absl::DataLossError(
          absl::StrCat("expected the sums of a metric, got '", text, "'"));
    }
    Sums sums;
    ExactSum* const parts[] = {&sums.positive, &sums.negative, &sums.weight};
    for (size_t i = 0; i < 3; ++i) {
      absl::StatusOr<ExactSum> part = ExactSum::Parse(words[i]);
      if (!part.ok()) {
        return absl::DataLossError(part.status().message());
      }
      *parts[i] = *std::move(part);
    }
    sums.nan = (flags & 1) != 0;
    sums.above = (flags & 2) != 0;
    sums.below = (flags & 4) != 0;
    return sums;
  }
};

namespace {

constexpr double kNone = std::numeric_limits<double>::quiet_NaN();
// Values on a device that are kept there until somebody needs them.
constexpr int64_t kMaxWaiting = 1 << 20;

void Require(bool good, absl::string_view name, absl::string_view expected,
             const at::Tensor& first, const at::Tensor& second) {
  if (good) return;
  ThrowIfError(absl::InvalidArgumentError(
      absl::StrCat("metric '", name, "': expected ", expected, ", got [",
                   absl::StrJoin(first.sizes(), ", "), "] and [",
                   absl::StrJoin(second.sizes(), ", "), "]")));
}

// Requires logits [..., classes] and labels [...].
void RequireClasses(absl::string_view name, const at::Tensor& logits,
                    const at::Tensor& labels) {
  Require(logits.dim() == labels.dim() + 1 &&
              logits.sizes().slice(0, labels.dim()) == labels.sizes(),
          name, "logits [..., classes] and labels [...]", logits, labels);
}

void RequireOne(absl::string_view name, const at::Tensor& mean) {
  Require(mean.numel() == 1, name, "a mean of one element", mean, mean);
}

at::Tensor Flat(const at::Tensor& values) {
  // On a device it waits, and the caller may write to its own meanwhile.
  return values.detach()
      .to(at::kDouble, /*non_blocking=*/false, /*copy=*/!values.is_cpu())
      .reshape({-1});
}

}  // namespace

Metric::Metric(std::string name)
    : name_(std::move(name)), value_(kNone), sums_(std::make_unique<Sums>()) {}
Metric::~Metric() = default;

void Metric::Reset() {
  *sums_ = Sums();
  waiting_.clear();
  waiting_numel_ = 0;
  value_ = kNone;
  weight_ = 0;
}

void Metric::AddValues(const at::Tensor& values, const at::Tensor& weights) {
  const c10::NoGradGuard no_gradients;
  if (weights.defined()) {
    Require(weights.sizes() == values.sizes(), name_,
            "weights of the values' sizes", values, weights);
  }
  if (!counts_) return;
  at::Tensor flat = Flat(values);
  waiting_numel_ += flat.numel();
  waiting_.push_back(
      {std::move(flat), weights.defined() ? Flat(weights) : at::Tensor()});
  const bool waits = !values.is_cpu() && waiting_numel_ < kMaxWaiting;
  if (!waits) Drain();
}

void Metric::Drain() const {
  for (const Waiting& each : std::exchange(waiting_, {})) {
    const at::Tensor values = each.values.cpu().contiguous();
    const at::Tensor weights =
        each.weights.defined() ? each.weights.cpu().contiguous() : at::Tensor();
    const double* const v = values.const_data_ptr<double>();
    const double* const w =
        weights.defined() ? weights.const_data_ptr<double>() : nullptr;
    for (int64_t i = 0; i < values.numel(); ++i) {
      const double weight = w == nullptr ? 1 : w[i];
      if (!(weight >= 0) || std::isinf(weight)) {
        ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
            "metric '", name_,
            "': expected weights that are finite and not negative, got ",
            weight)));
      }
      sums_->Add(v[i], weight);
    }
  }
  waiting_numel_ = 0;
}

std::string Metric::State() const {
  Drain();
  return sums_->Text();
}

absl::Status Metric::Load(absl::string_view state) {
  TESSERA_ASSIGN_OR_RETURN(Sums sums, Sums::Parse(state));
  Reset();
  *sums_ = std::move(sums);
  return absl::OkStatus();
}

void Mean::AddMean(const at::Tensor& mean, double count) {
  RequireOne(name(), mean);
  AddValues(mean, at::full_like(mean, count, at::kDouble));
}

Accuracy::Accuracy(std::string name, int64_t top_k, int64_t ignore_index)
    : Metric(std::move(name)), top_k_(top_k), ignore_index_(ignore_index) {}

void Accuracy::Add(const at::Tensor& logits, const at::Tensor& labels) {
  const c10::NoGradGuard no_gradients;
  RequireClasses(name(), logits, labels);
  at::Tensor correct;
  if (top_k_ == 1) {
    correct = logits.argmax(-1).eq(labels);
  } else {
    const at::Tensor best = std::get<1>(logits.topk(top_k_, -1));
    correct = best.eq(labels.unsqueeze(-1)).any(-1);
  }
  AddValues(correct, labels.ne(ignore_index_));
}

Perplexity::Perplexity(std::string name, int64_t ignore_index)
    : Metric(std::move(name)), ignore_index_(ignore_index) {}

void Perplexity::AddMean(const at::Tensor& mean, double tokens) {
  RequireOne(name(), mean);
  AddValues(mean, at::full_like(mean, tokens, at::kDouble));
}

void Perplexity::AddLogits(const at::Tensor& logits,
                           const at::Tensor& targets) {
  const c10::NoGradGuard no_gradients;
  RequireClasses(name(), logits, targets);
  const at::Tensor flat = targets.reshape({-1});
  AddValues(at::cross_entropy_loss(
                logits.detach().to(at::kFloat).reshape({-1, logits.size(-1)}),
                flat, /*weight=*/{}, at::Reduction::None, ignore_index_),
            flat.ne(ignore_index_));
}

double Perplexity::FromMean(double mean) const { return std::exp(mean); }

absl::Status ReduceMetrics(Communicator* comm,
                           const std::vector<Metric*>& metrics) {
  constexpr char kWhere[] = "ReduceMetrics";
  std::vector<std::string> names, mine;
  const absl::Status drained = CatchTorch(kWhere, [&] {
    for (const Metric* metric : metrics) {
      names.push_back(metric->name());
      mine.push_back(metric->State());
    }
  });
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(drained, kWhere));
  TESSERA_RETURN_IF_ERROR(
      comm->AgreeEqual(absl::StrJoin(names, ", "), "list of metrics"));
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      comm->AllGatherStrings(absl::StrJoin(mine, "\n"), {"metrics"}));
  std::vector<Metric::Sums> total(metrics.size());
  for (const std::string& text : all) {
    const std::vector<absl::string_view> theirs = absl::StrSplit(text, '\n');
    for (size_t i = 0; i < metrics.size(); ++i) {
      TESSERA_ASSIGN_OR_RETURN(const Metric::Sums sums,
                               Metric::Sums::Parse(theirs[i]));
      total[i].Add(sums);
    }
  }
  for (size_t i = 0; i < metrics.size(); ++i) {
    Metric* const metric = metrics[i];
    metric->weight_ = total[i].weight.Round();
    metric->value_ = metric->weight_ == 0
                         ? kNone
                         : metric->FromMean(total[i].Total() / metric->weight_);
  }
  return absl::OkStatus();
}

}  // namespace tessera
