// What scales a gradient (docs/guide.md has the table): weights, losses that
// add up, gradients from outside, accumulation, sums and means, predivision,
// loss scales, 16-bit wires and sums, clipping. Every pair of values of these
// at every stage, against plain arithmetic. That weights only weigh is in
// scaling_weights_test.cc.
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/status.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "gmock/gmock.h"
#include "tests/gradients/scaling_test_util.h"
#include "tests/support/pairwise.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::testing::Each;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Axes in this order.
enum Weight { kNoWeights, kEqual, kOdd, kUnequal, kNoData, kWeights };
enum Source { kOneLoss, kTwoLosses, kOutside, kTwoAndOutside, kSources };
enum Way { kOnce, kEach, kLocal, kNoSync, kByHand, kWays };
enum Reduction { kMean, kSum, kReductions };
enum Predivision { kAfter, kBefore, kPredivisions };
enum Precision {
  kFp32,
  kBf16,
  kStaticFp16,
  kDynamicFp16,
  kHalfWires,
  kHalfSums,
  kPrecisions
};
enum Clipping { kUnclipped, kNorm, kValue, kClippings };

constexpr double kMaxNorm = 1.5, kMaxValue = 2;
constexpr int kSteps = 2;

struct Case {
  int stage, weight, source, way, reduction, predivision, precision, clipping;

  // The choices are in the order above.
  Case(int stage, const Choice& c)
      : stage(stage),
        weight(static_cast<int>(c[0])),
        source(static_cast<int>(c[1])),
        way(static_cast<int>(c[2])),
        reduction(static_cast<int>(c[3])),
        predivision(static_cast<int>(c[4])),
        precision(static_cast<int>(c[5])),
        clipping(static_cast<int>(c[6])) {}
  std::string ToText() const {
    return absl::StrCat("stage ", stage, " weight ", weight, " source ", source,
                        " way ", way, " reduction ", reduction, " predivision ",
                        predivision, " precision ", precision, " clipping ",
                        clipping);
  }

  int accumulation() const { return way == kOnce || way == kByHand ? 1 : 2; }
  int backwards() const { return way == kOnce ? 1 : 2; }  // micro-batches
  int losses() const {
    return source == kTwoLosses || source == kTwoAndOutside ? 2 : 1;
  }
  bool outside() const {
    return source == kOutside || source == kTwoAndOutside;
  }
  std::optional<double> WeightOf(int rank, int world, int i) const {
    const int turn = (rank + i) % 2;
    switch (weight) {
      case kEqual:
        return 4096;
      case kOdd:
        return 3;
      case kUnequal:
        return 1 + 2 * turn;
      case kNoData:
        if (world == 1) return i == 0 ? 2 : 0;
        return rank == world - 1 ? 0 : 2;
      default:
        return std::nullopt;
    }
  }
  // Returns the gradient of element `e`, a small even number.
  static double OfLoss(int rank, int i, int loss, int64_t e) {
    return 2 * static_cast<double>((3 * rank + 2 * i + loss + e) % 5 - 2);
  }
  static double OfOutside(int rank, int i, int64_t e) {
    return 2 * static_cast<double>((rank + i + 2 * e) % 3 - 1);
  }

  proto::Config Config(int world) const {
    TrainingSpec spec;
    spec.stage = stage;
    spec.optimizer = "type:'SGD',params{lr:1}";
    spec.accumulation = accumulation();
    spec.accumulation_mode = way == kLocal ? "local" : "each";
    spec.reduction = reduction == kSum ? "sum" : "mean";
    if (predivision == kBefore) spec.predivide = world;
    if (precision == kBf16) spec.dtype = "bf16";
    if (precision == kStaticFp16 || precision == kDynamicFp16) {
      spec.dtype = "fp16";
      spec.initial_scale_power = 8;
      spec.loss_scale = precision == kStaticFp16 ? 128 : 0;
    }
    if (precision == kHalfWires) spec.reduce_dtype = "fp16";
    if (precision == kHalfSums) spec.gradient_dtype = "fp16";
    if (clipping == kNorm) spec.clipping = kMaxNorm;
    if (clipping == kValue) spec.clipping_value = kMaxValue;
    spec.more = "sharding{report_grad_norm:true}";
    return ConfigOf(spec);
  }
  // Returns the unit roundoff of what rounds besides float32.
  double epsilon() const {
    return precision == kFp32 ? 0x1p-24 : precision == kBf16 ? 0x1p-8 : 0x1p-11;
  }
};

// The expected result of a step, by the rules of the guide.
struct Expected {
  std::vector<double> gradient;
  std::vector<double> terms;  // absolute values of what is added up there
  double norm = 0;
  std::vector<double> change;  // of the parameters
  bool exact = true;           // every sum, product and quotient
};

bool IsPowerOfTwo(double x) {
  int power = 0;
  return std::frexp(x, &power) == 0.5;
}

Expected ExpectedOf(const Case& c, int world) {
  Expected expected;
  const double n = c.accumulation();
  double total = 0;  // samples, or shares of the mean
  int64_t numel = 0;
  for (const int64_t size : kSizes) numel += size;
  expected.gradient.resize(static_cast<size_t>(numel));
  expected.terms.resize(static_cast<size_t>(numel));
  for (int r = 0; r < world; ++r) {
    for (int i = 0; i < c.backwards(); ++i) {
      // A micro-batch without weights is one of `n` on one of `world` ranks.
      const double weight = c.WeightOf(r, world, i).value_or(1);
      total += weight;
      for (size_t e = 0; e < expected.gradient.size(); ++e) {
        const auto element = static_cast<int64_t>(e);
        double term = 0;
        for (int l = 0; l < c.losses(); ++l) {
          term += weight * Case::OfLoss(r, i, l, element);
        }
        if (c.outside()) term += weight * n * Case::OfOutside(r, i, element);
        expected.gradient[e] += term;
        expected.terms[e] += std::abs(term);
      }
    }
  }
  const bool weights = c.weight != kNoWeights;
  const double divisor = weights ? total : n * world;
  const double ranks = c.reduction == kSum ? world : 1;
  double square = 0;
  for (size_t e = 0; e < expected.gradient.size(); ++e) {
    expected.gradient[e] *= ranks / divisor;
    expected.terms[e] *= ranks / divisor;
    double& gradient = expected.gradient[e];
    if (c.clipping == kValue) {
      gradient = std::clamp(gradient, -kMaxValue, kMaxValue);
    }
    square += gradient * gradient;
  }
  expected.norm = std::sqrt(square);
  const double coefficient = c.clipping == kNorm && expected.norm > kMaxNorm
                                 ? kMaxNorm / (expected.norm + 1e-6)
                                 : 1;
  for (const double gradient : expected.gradient) {
    expected.change.push_back(-gradient * coefficient);
  }
  expected.exact = IsPowerOfTwo(world) && IsPowerOfTwo(divisor);
  return expected;
}

// Elements of all parameters, in order.
absl::StatusOr<std::vector<double>> Elements(
    const std::function<absl::StatusOr<at::Tensor>(const std::string&)>& of) {
  std::vector<double> all;
  for (size_t i = 0; i < std::size(kSizes); ++i) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor t,
                             of(absl::StrCat("unit", i, ".w")));
    for (int64_t e = 0; e < t.numel(); ++e) {
      all.push_back(t[e].item<double>());
    }
  }
  return all;
}

absl::Status Compare(absl::string_view what, const std::vector<double>& got,
                     const std::vector<double>& expected,
                     const std::function<double(size_t)>& bound) {
  for (size_t e = 0; e < expected.size(); ++e) {
    if (std::abs(got[e] - expected[e]) <= bound(e)) continue;
    return absl::InternalError(absl::StrCat(
        what, ": element ", e, " is ", got[e], ", expected ", expected[e],
        ", at most ", bound(e), " away; all are ", absl::StrJoin(got, " ")));
  }
  return absl::OkStatus();
}

// Runs one micro-batch: its losses, a Backward each; outside gradients come
// with the first.
absl::Status Backwards(const Case& c, Places& model, Engine& engine, int rank,
                       int world, int i) {
  BackwardOptions options;
  options.weight = c.WeightOf(rank, world, i);
  const double spoilt = options.weight == 0.0 ? kNan : 1;
  if (c.outside()) {
    model.LossOf([&](int64_t e) { return spoilt * c.OfOutside(rank, i, e); })
        .backward();
  }
  for (int l = 0; l < c.losses(); ++l) {
    options.more_losses = l + 1 < c.losses();
    options.add_outside = c.outside() && l == 0;
    TESSERA_RETURN_IF_ERROR(engine.Backward(model.LossOf([&](int64_t e) {
      return spoilt * c.OfLoss(rank, i, l, e);
    }),
                                            options));
  }
  return absl::OkStatus();
}

absl::Status TrainStep(const Case& c, Places& model, Engine& engine, int rank,
                       int world) {
  for (int i = 0; i < c.backwards(); ++i) {
    const bool last = i + 1 == c.backwards();
    std::optional<Engine::NoSyncScope> no_sync;
    if (!last && (c.way == kNoSync || c.way == kByHand)) {
      no_sync.emplace(&engine);
    }
    TESSERA_RETURN_IF_ERROR(Backwards(c, model, engine, rank, world, i));
    if (!last && c.way != kByHand) TESSERA_RETURN_IF_ERROR(engine.Step());
  }
  return absl::OkStatus();
}

absl::Status RunCase(const Case& c, const World& world) {
  const int rank = world.rank(), W = world.world_size();
  auto model = std::make_shared<Places>();
  TESSERA_ASSIGN_OR_RETURN(
      Trainee t, Trainee::Make(model, c.Config(W), world.communicator()));
  Engine& engine = *t.engine;
  const Expected expected = ExpectedOf(c, W);
  // Each of what is added up is rounded a few times on its way, and so is the
  // quotient; nothing is where all of it is exact.
  const auto bound = [&](size_t e) {
    return expected.exact ? 0 : 8 * c.epsilon() * expected.terms[e];
  };
  double norm_bound = 0x1p-50 * expected.norm;
  for (size_t e = 0; e < expected.gradient.size(); ++e) norm_bound += bound(e);
  for (int step = 1; step <= kSteps; ++step) {
    TESSERA_ASSIGN_OR_RETURN(
        const std::vector<double> before,
        Elements([&](const std::string& name) { return engine.Master(name); }));
    TESSERA_RETURN_IF_ERROR(TrainStep(c, *model, engine, rank, W));
    if (c.clipping != kValue) {  // which comes with Step
      TESSERA_ASSIGN_OR_RETURN(const std::vector<double> gradient,
                               Elements([&](const std::string& name) {
                                 return engine.Gradient(name);
                               }));
      TESSERA_RETURN_IF_ERROR(
          Compare("gradient", gradient, expected.gradient, bound));
    }
    TESSERA_RETURN_IF_ERROR(engine.Step());
    const StepReport& report = engine.last_step();
    if (report.skipped_steps != 0 || engine.step() != step) {
      return absl::InternalError(absl::StrCat("skipped ", report.skipped_steps,
                                              ", step ", engine.step()));
    }
    const double scale = c.precision == kStaticFp16    ? 128
                         : c.precision == kDynamicFp16 ? 256
                                                       : 1;
    if (report.loss_scale != scale) {
      return absl::InternalError(absl::StrCat("scale ", report.loss_scale));
    }
    TESSERA_RETURN_IF_ERROR(Compare("norm", {report.grad_norm}, {expected.norm},
                                    [&](size_t) { return norm_bound; }));
    TESSERA_ASSIGN_OR_RETURN(
        std::vector<double> change,
        Elements([&](const std::string& name) { return engine.Master(name); }));
    for (size_t e = 0; e < change.size(); ++e) change[e] -= before[e];
    // A factor that is no power of two, and a sum with the value before.
    const bool clipped = c.clipping == kNorm;
    TESSERA_RETURN_IF_ERROR(
        Compare("change", change, expected.change, [&](size_t e) {
          return expected.exact && !clipped
                     ? 0
                     : 2 * bound(e) + 0x1p-21 * (1 + expected.terms[e]);
        }));
  }
  return engine.Close();
}

// args: the stage, and of each case its choices.
TESSERA_RANK_FUNCTION(RunCases) {
  const std::vector<std::string> words = absl::StrSplit(args, '|');
  int stage = 0;
  TORCH_CHECK(absl::SimpleAtoi(words[0], &stage));
  std::string wrong;
  for (size_t i = 1; i < words.size(); ++i) {
    Choice choice;
    for (const char digit : words[i]) {
      choice.push_back(static_cast<size_t>(digit - '0'));
    }
    const Case c(stage, choice);
    const absl::Status status = RunCase(c, world);
    if (status.ok()) continue;
    absl::StrAppend(&wrong, c.ToText(), ": ", status.ToString(), "\n");
  }
  return wrong.empty() ? "right" : wrong;
}

INSTANTIATE_TEST_SUITE_P(All, ScalingTest, ::testing::Values(0, 1, 2, 3),
                         [](const auto& info) {
                           return absl::StrCat("Stage", info.param);
                         });

TEST_P(ScalingTest, EveryPairIsPlainArithmetic) {
  static const std::vector<Choice> cells =
      Pairwise({kWeights, kSources, kWays, kReductions, kPredivisions,
                kPrecisions, kClippings},
               44);
  // A third of the cells for each number of ranks; over the stages, all of
  // them.
  for (const int world_size : {1, 2, 3}) {
    std::string args = absl::StrCat(GetParam());
    for (size_t i = 0; i < cells.size(); ++i) {
      if ((static_cast<int>(i) + GetParam() + world_size) % 3 != 0) continue;
      absl::StrAppend(&args, "|", absl::StrJoin(cells[i], ""));
    }
    EXPECT_THAT(RunOnRanks(world_size, "RunCases", args), Each("right"))
        << world_size << " ranks";
  }
}

}  // namespace
}  // namespace tessera
