// Why two exchanges. Bits of a sum that depend on no cut need one unit for all
// ranks, which is the largest number's matter; and only when that is known can
// numbers be cut off to it. Both go for all parameters of the step together:
// lines are few, and a collective for each parameter would wait for as many
// round trips.
#include "optim/factored/adafactor.h"

#include <cmath>
#include <limits>
#include <utility>

#include "ATen/TensorIterator.h"
#include "ATen/ops/amax.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/full.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/repeat_interleave.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"
#include "base/layout/flat_buffer.h"
#include "base/status.h"
#include "optim/factored/boxes.h"

namespace tessera {
namespace {

// Elements of a box: what is worked on stays in the caches, or fills a device.
constexpr int64_t kMostOnCpu = 1 << 16, kMostOnDevice = 1 << 22;

// What a box touches of a tensor that has one element where it has a size of 1.
at::Tensor In(const at::Tensor& all, const Box& box) {
  at::Tensor part = all;
  for (int64_t d = 0; d < all.dim(); ++d) {
    if (all.size(d) == 1) continue;
    const auto i = static_cast<size_t>(d);
    part = part.narrow(d, box.begins[i], box.sizes[i]);
  }
  return part;
}

// The dim along which lines of state `s` of a parameter go.
int64_t DimOf(size_t s) { return s == 0 ? -1 : -2; }

at::Tensor SquaresOf(const at::Tensor& numbers) {
  return numbers.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true)
      .square_();
}

// Not multiplied by 1 / n, as libtorch does it with a number on a device.
at::Tensor MeansOf(const at::Tensor& sums, int64_t n) {
  return sums / at::full({}, n, sums.options());
}

double EpsOf(const OptimizerOptions& o, at::ScalarType masters) {
  if (o.eps > 0) return o.eps;
  return masters == at::kDouble ? std::numeric_limits<double>::epsilon()
                                : std::numeric_limits<float>::epsilon();
}

// g / sqrt(max(row * column, least)), NaN staying what it is.
template <typename T>
void DivideByRoots(char** data, const int64_t* strides, int64_t n, T least) {
  const auto divide = [least](T* g, T row, T column) {
    T v = row * column;
    v = v < least ? least : v;
    *g /= std::sqrt(v);
  };
  constexpr auto kItem = static_cast<int64_t>(sizeof(T));
  auto* const g = reinterpret_cast<T*>(data[0]);
  const auto* const rows = reinterpret_cast<const T*>(data[1]);
  const auto* const columns = reinterpret_cast<const T*>(data[2]);
  if (strides[0] == kItem && strides[1] == 0 && strides[2] == kItem) {
    for (int64_t i = 0; i < n; ++i) divide(g + i, *rows, columns[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    divide(g + i * strides[0] / kItem, rows[i * strides[1] / kItem],
           columns[i * strides[2] / kItem]);
  }
}

// In loops of its own: libtorch's sqrt of a contiguous tensor on the CPU may be
// MKL's, which does not round as the others.
void DivideByRootsOnCpu(const at::Tensor& part, const at::Tensor& rows,
                        const at::Tensor& columns, double least) {
  auto iterator = at::TensorIteratorConfig()
                      .resize_outputs(false)
                      .add_output(part)
                      .add_const_input(rows)
                      .add_const_input(columns)
                      .build();
  iterator.for_each([&](char** data, const int64_t* strides, int64_t n) {
    if (part.scalar_type() == at::kDouble) {
      DivideByRoots<double>(data, strides, n, least);
    } else {
      DivideByRoots<float>(data, strides, n, static_cast<float>(least));
    }
  });
}

}  // namespace

void AdafactorStep::Add(const FlatParameter& flat, at::Tensor gradient,
                        const FactoredStates& states,
                        const std::vector<Parameter>& parameters) {
  comm_ = flat.communicator();
  device_ = flat.update_device();
  sharded_ = flat.stage().sharded_optimizer && comm_->world_size() > 1;
  std::vector<Work>& unit = units_.emplace_back();
  size_t next = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const FlatParameter::Parameter& p = flat.parameters()[i];
    Work work;
    for (; next < states.all().size() && states.all()[next].parameter == i;
         ++next) {
      work.states.push_back(states.all()[next].values);
    }
    if (!parameters[i].has_gradient || p.tensor.numel() == 0) continue;
    work.parameter = parameters[i];
    work.sizes = p.tensor.sizes().vec();
    work.strides = p.tensor.strides().vec();
    const Range mine = Intersect(p.range, flat.owned());
    work.run = {mine.begin - p.range.begin, mine.end - p.range.begin};
    if (!mine.empty()) {
      work.part = Slice(gradient, {mine.begin - flat.owned().begin,
                                   mine.end - flat.owned().begin});
      if (work.parameter.options->maximize) work.part.neg_();
    }
    for (const at::Tensor& state : work.states) {
      work.lines.push_back({num_lines_, num_lines_ + state.numel()});
      num_lines_ += state.numel();
      counts_.push_back(state.numel());
      digits_.push_back(DigitsOf(p.tensor.numel() / state.numel()));
    }
    unit.push_back(std::move(work));
  }
}

at::Tensor AdafactorStep::LinesOf(const at::Tensor& all, const Work& work,
                                  size_t s) const {
  return Slice(all, work.lines[s]).view(work.states[s].sizes());
}

// visit(box, the part of the gradient in it)
template <typename Visit>
void AdafactorStep::VisitBoxes(const Work& work, const Visit& visit) const {
  if (!work.part.defined()) return;
  const int64_t most = work.part.is_cpu() ? kMostOnCpu : kMostOnDevice;
  for (const Box& box : BoxesOf(work.sizes, work.strides, work.run, most)) {
    int64_t first = work.part.storage_offset() - work.run.begin;
    for (size_t d = 0; d < box.begins.size(); ++d) {
      first += box.begins[d] * work.strides[d];
    }
    visit(box, work.part.as_strided(box.sizes, work.strides, first));
  }
}

absl::Status AdafactorStep::FindMeans() {
  if (num_lines_ == 0) return absl::OkStatus();
  const auto numbers = at::TensorOptions(at::kDouble).device(device_);
  const auto all_reduce = [&](const at::Tensor& sums) {
    return sharded_
               ? comm_->AllReduceSum(sums, CommTag{"factored variances"}).Wait()
               : absl::OkStatus();
  };
  at::Tensor largest = at::zeros({num_lines_}, numbers);
  const auto visit_lines = [&](const auto& visit) {
    for (const auto& unit : units_) {
      for (const Work& work : unit) {
        VisitBoxes(work, [&](const Box& box, const at::Tensor& part) {
          const at::Tensor squares = SquaresOf(part);
          for (size_t s = 0; s < work.states.size(); ++s) {
            visit(work, s, box, squares);
          }
        });
      }
    }
  };
  visit_lines([&](const Work& work, size_t s, const Box& box,
                  const at::Tensor& squares) {
    at::Tensor lines = In(LinesOf(largest, work, s), box);
    at::maximum_out(lines, lines,
                    work.factored()
                        ? at::amax(squares, DimOf(s), /*keepdim=*/true)
                        : squares);
  });
  const at::Tensor powers = BinPowers(largest);
  TESSERA_RETURN_IF_ERROR(all_reduce(powers));

  const auto wide = at::TensorOptions(at::kLong);
  const at::Tensor digits = at::tensor(digits_, wide)
                                .repeat_interleave(at::tensor(counts_, wide))
                                .to(device_);
  const LineCuts cuts(powers, digits);
  const at::Tensor halves = at::zeros({2, num_lines_}, numbers);
  visit_lines([&](const Work& work, size_t s, const Box& box,
                  const at::Tensor& squares) {
    const auto part = [&](const at::Tensor& of) {
      return In(LinesOf(of, work, s), box);
    };
    // A vector's lines have one number each.
    const at::Tensor column = work.factored() ? squares : squares.unsqueeze(-1);
    const auto line = [&](const at::Tensor& of) {
      return work.factored() ? part(of) : part(of).unsqueeze(-1);
    };
    AddHalves(column, DimOf(s), line(cuts.to_high), line(cuts.to_low),
              line(halves[0]), line(halves[1]));
  });
  TESSERA_RETURN_IF_ERROR(all_reduce(halves));
  means_ = cuts.Sums(halves[0], halves[1]);
  return absl::OkStatus();
}

void AdafactorStep::UpdateStates(const Work& work) const {
  const double weight = std::pow(static_cast<double>(work.parameter.step),
                                 work.parameter.options->beta2_decay);
  for (size_t s = 0; s < work.states.size(); ++s) {
    const at::Tensor& state = work.states[s];
    const at::Tensor before = state.to(at::kDouble);
    at::Tensor after = LinesOf(means_, work, s);
    if (work.factored()) {
      after = MeansOf(after, work.sizes.end()[DimOf(s)]);
    }
    after = (after - before).mul_(weight).add_(before);
    after.masked_fill_(after.isnan(), std::nan(""));  // one of all
    if (skip_.defined()) after = at::where(skip_, before, after);
    state.copy_(after);
  }
}

void AdafactorStep::Direct(size_t unit) {
  for (const Work& work : units_[unit]) {
    UpdateStates(work);
    const at::ScalarType dtype = work.states[0].scalar_type();
    const double eps = EpsOf(*work.parameter.options, dtype);
    at::Tensor first = work.states[0];
    if (work.factored()) {
      const at::Tensor rows = first.to(at::kDouble);
      const at::Tensor mean = MeansOf(WholeLineSums(rows, -2), rows.size(-2));
      first = (rows / mean.clamp_min(eps)).to(dtype);
    }
    const at::Tensor second =
        work.factored() ? work.states[1] : at::ones({}, first.options());
    VisitBoxes(work, [&](const Box& box, const at::Tensor& part) {
      const at::Tensor rows = In(first, box), columns = In(second, box);
      if (part.is_cpu()) {
        DivideByRootsOnCpu(part, rows, columns, eps * eps);
      } else {
        // A root of float32 that is computed in float64 is rounded as if once.
        const at::Tensor v = (rows * columns).clamp_min_(eps * eps);
        part.div_(v.to(at::kDouble).sqrt_().to(dtype));
      }
    });
  }
}

}  // namespace tessera
