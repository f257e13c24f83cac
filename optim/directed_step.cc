// Why matrices are dealt out. Every rank could make all of them orthogonal from
// a gathered direction, which would take W times the work; and shards cut
// matrices anywhere, so no rank has one by itself. Units follow each other in
// three stages (gathered, computed, sent back), so that the processor or device
// works on one while its neighbours are on their way.
//
// Sent are the few bits in which products are made anyway: the direction
// rounded to bfloat16, and the result as it is, each matrix by one rank, zeros
// by the others (a sum with zeros is exact). Directions that are computed with
// in float16 are sent in float32: they have any size, and only behind their
// norm's division that of float16's few exponents.
#include "optim/directed_step.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"
#include "base/check.h"
#include "base/status.h"
#include "optim/algorithms/algorithm.h"
#include "optim/matrix/newton_schulz.h"

namespace tessera {
namespace {

using Parameter = FlatParameter::Parameter;

NewtonSchulzOptions NewtonSchulzOf(const OptimizerOptions& o) {
  NewtonSchulzOptions options;
  options.steps = o.ns_steps;
  options.gram = o.ns_gram;
  options.dtype = o.ns_gram ? at::kHalf : at::kBFloat16;
  return options;
}

// In which directions are sent.
at::ScalarType SentDtype(const OptimizerOptions& o) {
  return o.ns_gram ? at::kFloat : at::kBFloat16;
}

// Rows and columns of a parameter: the last dims of a convolution are one.
std::pair<int64_t, int64_t> SizesOf(const Parameter& p) {
  const int64_t rows = p.tensor.size(0);
  return {rows, rows == 0 ? 0 : p.tensor.numel() / rows};
}

// A parameter's elements in a flat buffer, in its shape.
at::Tensor In(const at::Tensor& whole, const Parameter& p) {
  return whole.as_strided(p.tensor.sizes(), p.tensor.strides(), p.range.begin);
}

double ScaleOf(const OptimizerOptions& o, const DirectedParameter& p) {
  return RowOf(o.algorithm).directed->scale(o, p);
}

}  // namespace

void AddTrustSums(const DirectedUnit& unit, const at::Tensor& masters,
                  std::vector<NormSum>* sums) {
  const FlatParameter& flat = *unit.flat;
  const Range shard = flat.layout().shard(flat.communicator()->rank());
  for (const Parameter& p : flat.parameters()) {
    const Range mine = Intersect(Intersect(p.range, shard), flat.owned());
    for (const at::Tensor& of : {masters, unit.direction}) {
      NormSum& sum = sums->emplace_back(/*p=*/2);
      if (!mine.empty()) {
        sum.Add(of.narrow(0, mine.begin - flat.owned().begin, mine.numel()),
                p.storage_offset + mine.begin - p.range.begin);
      }
      sum.Finish();
    }
  }
}

std::vector<Completion> TrustRatios(
    absl::Span<const DirectedUnit> units, const std::vector<NormSum>& sums,
    const std::vector<OptimizerOptions>& options,
    const std::vector<int>& group_of) {
  std::vector<Completion> completions;
  auto sum = sums.begin();
  for (const DirectedUnit& unit : units) {
    Completion& completion = completions.emplace_back();
    for (const Parameter& p : unit.flat->parameters()) {
      DirectedParameter of;
      of.numel = p.tensor.numel();
      of.master = (sum++)->Norm();
      of.direction = (sum++)->Norm();
      const auto group =
          static_cast<size_t>(group_of[static_cast<size_t>(p.index)]);
      completion.scales.push_back(ScaleOf(options[group], of));
    }
  }
  return completions;
}

const OptimizerOptions& Orthogonalizer::OptionsOf(const DirectedUnit& unit,
                                                  size_t i) const {
  const auto index = static_cast<size_t>(unit.flat->parameters()[i].index);
  return options_[static_cast<size_t>(group_of_[index])];
}

absl::Status Orthogonalizer::Start(const DirectedUnit& unit) {
  const FlatParameter& flat = *unit.flat;
  Communicator* const comm = flat.communicator();
  load_.resize(static_cast<size_t>(comm->world_size()));
  InFlight in_flight;
  in_flight.unit = unit;
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const auto [rows, columns] = SizesOf(flat.parameters()[i]);
    const auto least = std::min_element(load_.begin(), load_.end());
    in_flight.worker.push_back(static_cast<int>(least - load_.begin()));
    if (!unit.has_gradient[i]) continue;
    *least +=
        OrthogonalFlops(rows, columns, NewtonSchulzOf(OptionsOf(unit, i)));
  }
  const at::Tensor sent = unit.direction.to(SentDtype(OptionsOf(unit, 0)));
  if (flat.stage().sharded_optimizer && comm->world_size() > 1) {
    in_flight.whole = at::empty({flat.layout().whole_numel()}, sent.options());
    in_flight.arrives =
        comm->AllGather(sent, in_flight.whole, CommTag{"Muon's directions"});
  } else {
    in_flight.whole = sent;
  }
  started_.push_back(std::move(in_flight));
  return absl::OkStatus();
}

absl::Status Orthogonalizer::ComputeMatrices(InFlight* in_flight) {
  const FlatParameter& flat = *in_flight->unit.flat;
  const int rank = flat.communicator()->rank();
  const at::Tensor from = in_flight->whole;
  in_flight->whole = at::zeros(
      {from.numel()}, from.options().dtype(
                          NewtonSchulzOf(OptionsOf(in_flight->unit, 0)).dtype));
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    const Parameter& p = flat.parameters()[i];
    const bool mine = in_flight->worker[i] == rank;
    if (!mine || !in_flight->unit.has_gradient[i] || p.tensor.numel() == 0) {
      continue;
    }
    const auto [rows, columns] = SizesOf(p);
    const at::Tensor matrix = In(from, p).reshape({rows, columns});
    const at::Tensor result =
        Orthogonal(matrix, NewtonSchulzOf(OptionsOf(in_flight->unit, i)));
    // No negative zeros, which sums over ranks would not keep.
    In(in_flight->whole, p).copy_(result.add(0).view(p.tensor.sizes()));
  }
  return absl::OkStatus();
}

absl::Status Orthogonalizer::Compute() {
  TESSERA_CHECK(!started_.empty()) << "nothing was started";
  InFlight in_flight = std::move(started_.front());
  started_.pop_front();
  const FlatParameter& flat = *in_flight.unit.flat;
  Communicator* const comm = flat.communicator();
  if (in_flight.arrives.valid()) {
    TESSERA_RETURN_IF_ERROR(in_flight.arrives.Wait());
  }
  TESSERA_RETURN_IF_ERROR(ComputeMatrices(&in_flight));
  in_flight.arrives = CommFuture();
  if (comm->world_size() > 1) {
    const CommTag tag{"orthogonal directions"};
    if (flat.stage().sharded_optimizer) {
      in_flight.part =
          at::empty({flat.owned().numel()}, in_flight.whole.options());
      in_flight.arrives =
          comm->ReduceScatterSum(in_flight.whole, in_flight.part, tag);
    } else {
      in_flight.arrives = comm->AllReduceSum(in_flight.whole, tag);
    }
  }
  computed_.push_back(std::move(in_flight));
  return absl::OkStatus();
}

absl::StatusOr<Completion> Orthogonalizer::Finish() {
  TESSERA_CHECK(!computed_.empty()) << "nothing was computed";
  InFlight in_flight = std::move(computed_.front());
  computed_.pop_front();
  const FlatParameter& flat = *in_flight.unit.flat;
  if (in_flight.arrives.valid()) {
    TESSERA_RETURN_IF_ERROR(in_flight.arrives.Wait());
  }
  const bool scattered =
      flat.stage().sharded_optimizer && flat.communicator()->world_size() > 1;
  Completion completion;
  completion.direction = scattered ? in_flight.part : in_flight.whole;
  if (flat.step_dtype() != at::kFloat) {
    completion.direction = completion.direction.to(flat.step_dtype());
  }
  for (size_t i = 0; i < flat.parameters().size(); ++i) {
    DirectedParameter of;
    std::tie(of.rows, of.columns) = SizesOf(flat.parameters()[i]);
    completion.scales.push_back(ScaleOf(OptionsOf(in_flight.unit, i), of));
  }
  return completion;
}

}  // namespace tessera
