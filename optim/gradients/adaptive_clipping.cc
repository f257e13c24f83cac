// Why sums of blocks per unit. Norms are to be the same wherever shards cut; so
// a unit's is made of sums over what it has of each block of 64 elements of the
// storage (shards are cut between blocks), and these are added exactly, as in
// the norm of all gradients. Where every block is of one unit, of rows of a
// multiple of 64 elements, that is the norm's own loop; elsewhere a plain one
// goes through the elements, on the host.
#include "optim/gradients/adaptive_clipping.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string>
#include <utility>

#include "ATen/ops/arange.h"
#include "ATen/ops/tensor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "optim/gradients/owned_gradients.h"
#include "optim/norm/block_powers.h"
#include "optim/norm/grad_norm.h"

namespace tessera {
namespace {

using Flats = std::vector<std::shared_ptr<FlatParameter>>;
using Parameter = FlatParameter::Parameter;

constexpr int64_t kChunk = int64_t{1} << 20;  // elements
static_assert(kChunk % kNormBlock == 0, "chunks are whole blocks");

// A parameter's units in memory: element i is of unit i / stride % count.
struct Units {
  int64_t count = 1, stride = 1;
  bool follow = true;  // one after the other

  int64_t of(int64_t element) const { return element / stride % count; }
};

Units UnitsOf(const Parameter& p) {
  Units units;
  units.stride = std::max<int64_t>(p.range.numel(), 1);
  if (p.tensor.dim() <= 1 || p.tensor.size(0) <= 1) return units;
  units.count = p.tensor.size(0);
  units.stride = p.tensor.stride(0) * (p.tensor.is_complex() ? 2 : 1);
  units.follow = units.count * units.stride == p.range.numel();
  return units;
}

// What this rank has of a parameter.
struct Part {
  double clipping = 0;
  Range elements;  // of the parameter
  Units units;
  int64_t first_unit = 0;
  struct Norms {
    NormSum weights{2}, gradient{2};
  };
  std::vector<double> factors;   // of the units from that on
  std::map<int64_t, Norms> cut;  // by number of the unit, of those

  int64_t num_units() const {
    return units.follow ? units.of(elements.end - 1) - first_unit + 1
                        : units.count;
  }
  bool Cuts(int64_t unit, int64_t numel) const {
    if (!units.follow) return elements.numel() < numel;
    return unit * units.stride < elements.begin ||
           (unit + 1) * units.stride > elements.end;
  }
};

std::vector<double> BlockSums(const at::Tensor& chunk, int64_t first) {
  if (chunk.is_cpu()) return BlockPowers(chunk, first, /*p=*/2);
  const at::Tensor sums = BlockPowersByOperators(chunk, first, /*p=*/2).cpu();
  const double* const data = sums.const_data_ptr<double>();
  return {data, data + sums.numel()};
}

// Calls add(unit, sum) for what each block of the storage has of each unit.
template <typename Add>
void VisitElements(const at::Tensor& chunk, int64_t first, int64_t begin,
                   const Units& units, const Add& add) {
  struct Lanes {
    int64_t unit;
    std::array<double, 8> sums = {};
  };
  std::vector<Lanes> block;
  const auto finish = [&] {
    for (const auto& [unit, l] : block) {
      add(unit,
          ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7])));
    }
    block.clear();
  };
  const at::Tensor host = chunk.to(at::kCPU, at::kDouble).contiguous();
  const double* const x = host.const_data_ptr<double>();
  for (int64_t i = 0; i < host.numel(); ++i) {
    if ((first + i) % kNormBlock == 0) finish();
    const int64_t unit = units.of(begin + i);
    auto it = std::find_if(block.rbegin(), block.rend(),
                           [&](const Lanes& l) { return l.unit == unit; });
    if (it == block.rend()) {
      block.push_back({unit});
      it = block.rbegin();
    }
    it->sums[static_cast<size_t>((first + i) % 8)] += x[i] * x[i];
  }
  finish();
}

// `values`: the part's; `first`: where it begins in its storage.
std::vector<NormSum> SumsOf(const at::Tensor& values, int64_t first,
                            const Part& part) {
  std::vector<NormSum> sums(static_cast<size_t>(part.num_units()),
                            NormSum(/*p=*/2));
  const auto add = [&](int64_t unit, double sum) {
    sums[static_cast<size_t>(unit - part.first_unit)].AddBlock(sum);
  };
  const Units& units = part.units;
  const bool whole_blocks =
      units.count == 1 || (units.follow && units.stride % kNormBlock == 0 &&
                           (first - part.elements.begin) % kNormBlock == 0);
  const int64_t numel = values.numel();
  for (int64_t begin = 0, end; begin < numel; begin = end) {
    end = std::min(numel, ((first + begin) / kChunk + 1) * kChunk - first);
    const at::Tensor chunk = values.narrow(0, begin, end - begin);
    const int64_t element = part.elements.begin + begin;
    if (!whole_blocks) {
      VisitElements(chunk, first + begin, element, units, add);
      continue;
    }
    int64_t at = element;
    for (const double sum : BlockSums(chunk, first + begin)) {
      add(units.of(at), sum);
      at += kNormBlock - (first + at - part.elements.begin) % kNormBlock;
    }
  }
  return sums;
}

double FactorOf(double weights, double gradient, double clipping,
                const AdaptiveClipping& options) {
  const double norm = gradient * (1 / options.divisor);
  const double most = clipping * std::max(weights, options.eps);
  return std::isfinite(norm) && norm > most ? most / norm : 1;
}

// `masters`: the same elements' as those of `gradient`.
Part MeasuredPart(const GradientPart& gradient, const at::Tensor& masters,
                  const AdaptiveClipping& options) {
  const Parameter& p = gradient.parameter;
  Part part;
  part.clipping = options.clipping[static_cast<size_t>(p.index)];
  part.elements = gradient.elements;
  part.units = UnitsOf(p);
  if (part.units.follow) part.first_unit = part.units.of(part.elements.begin);
  const std::vector<NormSum> weights = SumsOf(masters, gradient.first, part);
  const std::vector<NormSum> sums =
      SumsOf(gradient.values, gradient.first, part);
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t unit = part.first_unit + static_cast<int64_t>(i);
    if (part.Cuts(unit, p.range.numel())) part.cut[unit];
    part.factors.push_back(
        FactorOf(weights[i].Norm(), sums[i].Norm(), part.clipping, options));
  }
  for (auto& [unit, norms] : part.cut) {
    const auto i = static_cast<size_t>(unit - part.first_unit);
    norms = {weights[i], sums[i]};
  }
  return part;
}

// By the parameter's number in the model.
using Parts = std::map<int64_t, Part>;

constexpr char kWhat[] = "adaptive gradient clipping";

absl::StatusOr<Parts> Measure(const Flats& flats,
                              const AdaptiveClipping& options,
                              const Gradients& gradients) {
  Parts parts;
  TESSERA_RETURN_IF_ERROR(VisitOwned(
      kWhat, flats,
      [&](const Parameter& p) {
        return options.clipping[static_cast<size_t>(p.index)] > 0;
      },
      gradients,
      [&](const GradientParts& measured) -> absl::Status {
        const FlatParameter& flat = *flats[measured[0].unit];
        TESSERA_ASSIGN_OR_RETURN(const RaisedValue masters,
                                 flat.states().RaiseValue());
        for (const GradientPart& part : measured) {
          const int64_t begin = part.parameter.range.begin +
                                part.elements.begin - flat.owned().begin;
          parts.emplace(
              part.parameter.index,
              MeasuredPart(
                  part, masters.View().narrow(0, begin, part.elements.numel()),
                  options));
        }
        return absl::OkStatus();
      }));
  return parts;
}

// ---- units that are cut

std::string KeyOf(int64_t parameter, int64_t unit) {
  return absl::StrCat(parameter, ":", unit);
}

// A line "key TAB weights TAB gradient" for each.
std::string TextOf(const Parts& parts) {
  std::string text;
  for (const auto& [index, part] : parts) {
    for (const auto& [unit, norms] : part.cut) {
      absl::StrAppend(&text, KeyOf(index, unit), "\t",
                      norms.weights.Serialize(), "\t",
                      norms.gradient.Serialize(), "\n");
    }
  }
  return text;
}

// All ranks' of each; of a text that is none the error of NormSum::Merge.
absl::StatusOr<std::map<std::string, Part::Norms>> Merged(
    const std::vector<std::string>& ranks) {
  std::map<std::string, Part::Norms> merged;
  for (const std::string& rank : ranks) {
    for (const absl::string_view line :
         absl::StrSplit(rank, '\n', absl::SkipEmpty())) {
      const std::vector<absl::string_view> words = absl::StrSplit(line, '\t');
      if (words.size() != 3) {
        return absl::DataLossError(absl::StrCat(
            "adaptive gradient clipping: expected a unit and two sums, got '",
            line, "'; see that all ranks run one build"));
      }
      Part::Norms& norms = merged[std::string(words[0])];
      TESSERA_RETURN_IF_ERROR(norms.weights.Merge(words[1]));
      TESSERA_RETURN_IF_ERROR(norms.gradient.Merge(words[2]));
    }
  }
  return merged;
}

absl::Status JoinCutUnits(const AdaptiveClipping& options, Communicator* comm,
                          Parts* parts) {
  TESSERA_ASSIGN_OR_RETURN(
      const std::vector<std::string> all,
      comm->AllGatherStrings(TextOf(*parts), CommTag{kWhat}));
  TESSERA_ASSIGN_OR_RETURN(auto merged, Merged(all));
  for (auto& [index, part] : *parts) {
    for (const auto& [unit, mine] : part.cut) {
      const Part::Norms& norms = merged[KeyOf(index, unit)];
      part.factors[static_cast<size_t>(unit - part.first_unit)] = FactorOf(
          norms.weights.Norm(), norms.gradient.Norm(), part.clipping, options);
    }
  }
  return absl::OkStatus();
}

// ---- what changes

bool Changes(const Part& part) {
  return std::any_of(part.factors.begin(), part.factors.end(),
                     [](double factor) { return factor != 1; });
}

// `segment`: the part's gradient. Factors are rounded to its dtype.
void Multiply(const at::Tensor& segment, const Part& part) {
  const at::Tensor factors =
      at::tensor(part.factors, at::kDouble).to(segment.options());
  const Units& units = part.units;
  if (!units.follow) {
    const at::Tensor unit =
        at::arange(part.elements.begin, part.elements.end,
                   at::TensorOptions(at::kLong).device(segment.device()))
            .div(units.stride, "floor")
            .remainder(units.count);
    segment.mul_(factors.index_select(0, unit));
    return;
  }
  int64_t at = part.elements.begin;
  const auto next = [&](int64_t end) {
    const at::Tensor piece =
        segment.narrow(0, at - part.elements.begin, end - at);
    at = end;
    return piece;
  };
  const auto number = [&] { return units.of(at) - part.first_unit; };
  const int64_t lead = std::min(
      (at + units.stride - 1) / units.stride * units.stride, part.elements.end);
  if (lead > at) {
    const at::Tensor factor = factors.select(0, number());
    next(lead).mul_(factor);
  }
  const int64_t whole = (part.elements.end - at) / units.stride;
  if (whole > 0) {
    const at::Tensor factor = factors.narrow(0, number(), whole).unsqueeze(1);
    next(at + whole * units.stride).view({whole, units.stride}).mul_(factor);
  }
  if (at < part.elements.end) {
    const at::Tensor factor = factors.select(0, number());
    next(part.elements.end).mul_(factor);
  }
}

}  // namespace

absl::Status ClipAdaptively(const Flats& flats, const AdaptiveClipping& options,
                            const std::function<void()>& before_change,
                            Gradients* gradients) {
  if (flats.empty()) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(Parts parts, Measure(flats, options, *gradients));
  if (flats[0]->stage().sharded_optimizer &&
      flats[0]->communicator()->world_size() > 1) {
    TESSERA_RETURN_IF_ERROR(
        JoinCutUnits(options, flats[0]->communicator(), &parts));
  }
  if (std::none_of(parts.begin(), parts.end(),
                   [](const auto& part) { return Changes(part.second); })) {
    return absl::OkStatus();
  }
  before_change();
  return ChangeOwned(
      kWhat, flats,
      [&](const Parameter& p) {
        const auto part = parts.find(p.index);
        return part != parts.end() && Changes(part->second);
      },
      gradients,
      [&](const GradientParts& changed) {
        for (const GradientPart& part : changed) {
          const at::ScalarType dtype = flats[part.unit]->step_dtype();
          const at::Tensor wide = part.values.to(dtype);  // or itself
          Multiply(wide, parts.at(part.parameter.index));
          if (!wide.is_same(part.values)) part.values.copy_(wide);  // rounded
        }
      });
}

}  // namespace tessera
