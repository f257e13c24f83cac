#include "engine/observe/parameter_histograms.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/view_as_real.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "comm/all_gather_values.h"
#include "config/config.pb.h"
#include "monitor/histogram.h"
#include "optim/gradients/owned_gradients.h"
#include "sharding/partition/names.h"

namespace tessera {
namespace {

using Flats = std::vector<std::shared_ptr<FlatParameter>>;
using Numbers = absl::Span<const double>;

constexpr char kWhat[] = "histograms";
// Elements that are looked at at once.
constexpr int64_t kChunk = int64_t{1} << 18;

// The histograms of a step; identical on all ranks.
struct Histograms {
  std::vector<std::string> tags;
  // By the parameter's number in the model: the histogram's number; -1: none.
  std::vector<int> gradients, weights;
};

// What is done with this rank's numbers of a histogram, a piece at a time.
using Visit = std::function<void(size_t histogram, Numbers numbers)>;

// Visits `values`, multiplied by `factor`.
void VisitNumbers(const at::Tensor& values, double factor,
                  const std::function<void(Numbers)>& visit) {
  const at::Tensor real =
      values.is_complex() ? at::view_as_real(values).reshape({-1}) : values;
  for (int64_t begin = 0; begin < real.numel(); begin += kChunk) {
    const at::Tensor chunk =
        real.narrow(0, begin, std::min(kChunk, real.numel() - begin))
            .to(at::kCPU, at::kDouble, /*non_blocking=*/false, /*copy=*/true);
    if (factor != 1) chunk.mul_(factor);
    visit(Numbers(chunk.const_data_ptr<double>(),
                  static_cast<size_t>(chunk.numel())));
  }
}

void VisitParts(const GradientParts& parts, const std::vector<int>& numbers,
                double factor, const Visit& visit) {
  for (const GradientPart& part : parts) {
    const int number = numbers[static_cast<size_t>(part.parameter.index)];
    if (number < 0) continue;
    VisitNumbers(part.values, factor, [&](Numbers values) {
      visit(static_cast<size_t>(number), values);
    });
  }
}

bool AnyOf(const FlatParameter& flat, const std::vector<int>& numbers) {
  return std::any_of(flat.parameters().begin(), flat.parameters().end(),
                     [&](const FlatParameter::Parameter& p) {
                       return numbers[static_cast<size_t>(p.index)] >= 0;
                     });
}

// `wanted`: by the parameter's number in the model.
Histograms TableOf(const Flats& flats, const Gradients& gradients,
                   const std::vector<bool>& wanted,
                   const proto::Histograms& section) {
  Histograms table;
  table.gradients.assign(wanted.size(), -1);
  table.weights.assign(wanted.size(), -1);
  for (size_t u = 0; u < flats.size(); ++u) {
    for (size_t i = 0; i < flats[u]->parameters().size(); ++i) {
      const FlatParameter::Parameter& p = flats[u]->parameters()[i];
      const auto index = static_cast<size_t>(p.index);
      if (!wanted[index] || !gradients.of(u).has_gradient(i)) continue;
      const auto add = [&](const char* kind, std::vector<int>* numbers) {
        (*numbers)[index] = static_cast<int>(table.tags.size());
        table.tags.push_back(absl::StrCat(kind, "/", p.name));
      };
      if (section.gradients()) add("gradients", &table.gradients);
      if (section.weights()) add("weights", &table.weights);
    }
  }
  return table;
}

// Visits this rank's shards of all histograms.
absl::Status VisitAll(const Histograms& table, const Flats& flats,
                      const Gradients& gradients, double divisor,
                      const Visit& visit) {
  TESSERA_RETURN_IF_ERROR(VisitShards(
      kWhat, flats, gradients,
      [&](const FlatGradient&, const GradientParts& parts) {
        VisitParts(parts, table.gradients, 1 / divisor, visit);
      },
      [&](const FlatGradient& gradient) {
        return !AnyOf(gradient.flat(), table.gradients);
      }));
  return CatchTorch(kWhat, [&]() -> absl::Status {
    TorchScope scope;
    for (size_t u = 0; u < flats.size(); ++u) {
      if (!AnyOf(*flats[u], table.weights)) continue;
      TESSERA_ASSIGN_OR_RETURN(const RaisedValue value,
                               flats[u]->states().RaiseValue());
      VisitParts(ShardsOf(gradients.of(u), value.View()), table.weights,
                 /*factor=*/1, visit);
    }
    return absl::OkStatus();
  });
}

// Each shard group holds all parameters, or this rank's parts of them.
absl::Status SumCounts(Communicator* group,
                       std::vector<StepMetrics::Values>* histograms) {
  int64_t numel = 0;
  for (const StepMetrics::Values& each : *histograms) {
    numel += static_cast<int64_t>(each.histogram.counts.size());
  }
  if (numel == 0) return absl::OkStatus();
  TorchScope scope;
  const at::Tensor all = at::empty({numel}, at::kLong);
  int64_t* to = all.mutable_data_ptr<int64_t>();
  for (const StepMetrics::Values& each : *histograms) {
    to = std::copy(each.histogram.counts.begin(), each.histogram.counts.end(),
                   to);
  }
  TESSERA_RETURN_IF_ERROR(
      group->AllReduceSum(all, {"counts of histograms"}).Wait());
  const int64_t* from = all.const_data_ptr<int64_t>();
  for (StepMetrics::Values& each : *histograms) {
    std::vector<int64_t>& counts = each.histogram.counts;
    std::copy_n(from, counts.size(), counts.begin());
    from += counts.size();
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ParameterHistograms> ParameterHistograms::Create(
    const ShardedModel* model, const proto::Histograms& section) {
  ParameterHistograms made;
  made.model_ = model;
  made.every_steps_ = section.every_steps();
  made.section_ = &section;
  PathPatterns patterns("histograms.parameters", {section.parameters().begin(),
                                                  section.parameters().end()});
  std::vector<std::string> names;
  for (const auto& flat : model->flats()) {
    for (const FlatParameter::Parameter& p : flat->parameters()) {
      const auto index = static_cast<size_t>(p.index);
      if (made.wanted_.size() <= index) made.wanted_.resize(index + 1);
      made.wanted_[index] =
          section.parameters().empty() || patterns.Match(p.name);
      names.push_back(p.name);
    }
  }
  if (!section.parameters().empty() && !names.empty()) {
    TESSERA_RETURN_IF_ERROR(patterns.CheckMatched(names, /*of_modules=*/false));
  }
  return made;
}

// An error of one rank, a disk's, say, is told before each exchange, in which
// the others would wait for it.
absl::StatusOr<std::vector<StepMetrics::Values>> ParameterHistograms::Make(
    const Gradients& gradients, double divisor) const {
  const Flats& flats = model_->flats();
  std::vector<StepMetrics::Values> histograms;
  if (flats.empty()) return histograms;
  Histograms table = TableOf(flats, gradients, wanted_, *section_);
  if (table.tags.empty()) return histograms;

  Communicator* const comm = model_->comm();
  std::vector<HistogramRange> ranges(table.tags.size());
  TESSERA_RETURN_IF_ERROR(
      comm->AgreeOk(VisitAll(table, flats, gradients, divisor,
                             [&](size_t histogram, Numbers numbers) {
                               ranges[histogram].Add(numbers);
                             }),
                    kWhat));
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::vector<HistogramRange>> all,
      AllGatherValues(comm, ranges, CommTag{"ranges of histograms"}));
  const RankCopies copies = CopiesOver(*flats[0], *comm);
  for (size_t h = 0; h < table.tags.size(); ++h) {
    HistogramRange whole;
    for (int rank = 0; rank < comm->world_size(); ++rank) {
      if (copies.CopyOf(rank) != 0) continue;
      whole.Merge(all[static_cast<size_t>(rank)][h]);
    }
    histograms.push_back({std::move(table.tags[h]), EmptyHistogram(whole)});
  }
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(
      VisitAll(table, flats, gradients, divisor,
               [&](size_t histogram, Numbers numbers) {
                 CountInto(numbers, &histograms[histogram].histogram);
               }),
      kWhat));
  TESSERA_RETURN_IF_ERROR(CatchTorch(kWhat, [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(SumCounts(flats[0]->communicator(), &histograms));
    if (model_->has_stages()) {
      return SumCounts(model_->pipeline().get(), &histograms);
    }
    return model_->has_cuts() ? SumCounts(model_->tensor().get(), &histograms)
                              : absl::OkStatus();
  }));
  return histograms;
}

}  // namespace tessera
