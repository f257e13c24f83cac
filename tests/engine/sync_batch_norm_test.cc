// SyncBatchNorm beside batch normalization of all ranks' samples in one
// process, in float64: results, gradients and running statistics, for batches
// that differ in size, some empty; and what has to be the same bits. With an
// engine: sync_batch_norm_training_test.cc.
//
// The bounds, with u = 2^-24, M the largest |mean| of a rank, V the variance, z
// = (x - mean) / sqrt(V), s = weight / sqrt(V + eps), n the most samples of a
// rank, first order in u. Means of ranks are rounded to float32, so
//   mean     u M, and as a float32 number 2 u M
//   V        u V for the ranks' own, 2 u M sqrt(V) by their means, u V as a
//            float32 number: 2 u V + 2 u M sqrt(V)
//   s        half of that, and four operations: s (4.5 u + u M / sqrt(V))
//   y        x s + (bias - mean s), with 6 more roundings of the terms:
//            u (6.5 |x s| + 9.5 M |s| + M |z s| + 2 |bias|)
//   z here   e = 6 u (1 + |z|) (|x| + M) / sqrt(V + eps)
//   sums     of n terms: (n + 4) u of the sum of absolute terms, and of those
//            with z besides the sum of |g| e
//   gradient s (g - mean(g) - z mean(g z)): the errors of s, of each term, and
//            7 u of the absolute terms for the operations
#include "nn/sync_batch_norm.h"

#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/world/world.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/engine/sync_batch_norm_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/trainee.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kUnit = 0x1p-24;
constexpr int64_t kChannels = 3;

absl::Status Within(const Tensor& got, const Tensor& exact, const Tensor& bound,
                    const std::string& what) {
  if (got.numel() == 0) return absl::OkStatus();
  const Tensor share = (got.to(at::kDouble) - exact).abs() / bound;
  const double worst = share.max().item<double>();
  return Expect(worst <= 1,
                absl::StrCat(what, ": ", worst, " times the bound"));
}

struct Case {
  int dims = 2;
  std::vector<int64_t> samples;  // by rank of the group
  at::ScalarType dtype = at::kFloat;
  double offset = 0;  // of the means from 0, in deviations
  bool affine = true, tracks = true, cumulative = false, last = false;
  std::string ToString() const {
    return absl::StrCat(
        dims, "d of ", absl::StrJoin(samples, "+"), " ", at::toString(dtype),
        " offset ", offset, affine ? " affine" : "", tracks ? " tracks" : "",
        cumulative ? " cumulative" : "", last ? " channels_last" : "");
  }
};

nn::BatchNormOptions OptionsOf(const Case& c) {
  auto options = nn::BatchNormOptions(kChannels).affine(c.affine);
  options.track_running_stats(c.tracks);
  if (c.cumulative) options.momentum(std::nullopt);
  return options;
}

// A module of each rank, and the exact one of all samples.
template <typename Sync, typename Plain>
class Checked {
 public:
  Checked(const Case& c, std::shared_ptr<Communicator> group)
      : c_(c),
        group_(std::move(group)),
        sync_(OptionsOf(c), SyncBatchNormOptions{group_, "it"}),
        plain_(OptionsOf(c)) {
    if (!c.affine) return;
    const at::NoGradGuard no_grad;
    sync_->weight.copy_(torch::randn({kChannels}));
    sync_->bias.copy_(torch::randn({kChannels}));
    plain_->weight.copy_(sync_->weight);
    plain_->bias.copy_(sync_->bias);
  }

  // Trains and checks one batch.
  absl::Status Step() {
    Draw();
    const Tensor y = sync_(x_);
    y.backward(g_);
    Exact();
    Bounds();
    TESSERA_RETURN_IF_ERROR(Compare(y));
    return c_.tracks ? CompareStatistics() : absl::OkStatus();
  }
  std::string statistics() {
    return c_.tracks ? absl::StrCat(BitsOf(sync_->running_mean),
                                    BitsOf(sync_->running_var))
                     : "";
  }

  // torch::nn::BatchNorm's bits, and no other rank is asked.
  absl::Status Evaluate() {
    const at::NoGradGuard no_grad;
    if (c_.tracks) {
      plain_->running_mean.copy_(sync_->running_mean);
      plain_->running_var.copy_(sync_->running_var);
    }
    plain_->eval();
    sync_->eval();
    return Expect(
        group_->rank() != 0 || at::equal(sync_(all_x_), plain_(all_x_)),
        "evaluation has other bits");
  }

 private:
  std::vector<int64_t> Sizes(int64_t samples) const {
    std::vector<int64_t> sizes = {samples, kChannels};
    for (int i = 1; i <= c_.dims && c_.dims > 1; ++i) sizes.push_back(1 + i);
    return sizes;
  }

  // All ranks draw all samples.
  void Draw() {
    int64_t all = 0, first = 0;
    for (int r = 0; r < group_->world_size(); ++r) {
      if (r == group_->rank()) first = all;
      all += c_.samples[static_cast<size_t>(r)];
    }
    mine_ = c_.samples[static_cast<size_t>(group_->rank())];
    std::vector<int64_t> per_channel(Sizes(all).size(), 1);
    per_channel[1] = kChannels;
    all_x_ = (torch::randn(Sizes(all)) * 3 +
              c_.offset * 3 * (1 + torch::rand(per_channel)))
                 .to(c_.dtype);
    all_g_ = torch::randn(Sizes(all)).to(c_.dtype);
    first_ = first;
    const auto format = !c_.last       ? at::MemoryFormat::Contiguous
                        : c_.dims == 2 ? at::MemoryFormat::ChannelsLast
                                       : at::MemoryFormat::ChannelsLast3d;
    x_ = Part(all_x_).clone(format).requires_grad_();
    g_ = Part(all_g_).clone(format);
    sync_->zero_grad();
  }
  Tensor Part(const Tensor& all) const {
    return all.slice(0, first_, first_ + mine_);
  }

  static Tensor Spread(const Tensor& per_channel, const Tensor& like) {
    std::vector<int64_t> sizes(static_cast<size_t>(like.dim()), 1);
    sizes[1] = -1;
    return per_channel.view(sizes);
  }

  // Computes the exact results in float64.
  void Exact() {
    const Tensor x = all_x_.to(at::kDouble), g = all_g_.to(at::kDouble);
    dims_ = {0};
    for (int64_t d = 2; d < x.dim(); ++d) dims_.push_back(d);
    count_ = static_cast<double>(x.numel() / kChannels);
    mean_ = x.mean(dims_);
    var_ = x.var(dims_, /*correction=*/0);
    w_ = c_.affine ? sync_->weight.detach().to(at::kDouble)
                   : torch::ones({kChannels}, at::kDouble);
    b_ = c_.affine ? sync_->bias.detach().to(at::kDouble)
                   : torch::zeros({kChannels}, at::kDouble);
    inverse_ = (var_ + kEps).rsqrt();
    s_ = w_ * inverse_;
    z_ = (x - Spread(mean_, x)) * Spread(inverse_, x);
    const Tensor& z = z_;
    y_ = z * Spread(w_, x) + Spread(b_, x);
    g_mean_ = g.mean(dims_);
    gz_mean_ = (g * z).mean(dims_);
    dx_ = Spread(s_, x) * (g - Spread(g_mean_, x) - z * Spread(gz_mean_, x));
    dw_ = (g * z).sum(dims_);
    db_ = g.sum(dims_);
  }

  // Computes the bounds that are derived above.
  void Bounds() {
    const Tensor x = all_x_.to(at::kDouble), g = all_g_.to(at::kDouble);
    most_ = torch::zeros({kChannels}, at::kDouble);
    int64_t n = 0, at = 0, largest = 0;
    for (int r = 0; r < group_->world_size(); ++r) {
      n = c_.samples[static_cast<size_t>(r)];
      largest = std::max(largest, n);
      if (n > 0) {
        most_ = torch::maximum(most_, x.slice(0, at, at + n).mean(dims_).abs());
      }
      at += n;
    }
    const double terms =
        static_cast<double>(largest) * count_ / static_cast<double>(at);
    const Tensor& z = z_;
    const Tensor M = Spread(most_, x), root = Spread(var_.sqrt(), x);
    const Tensor s = Spread(s_, x).abs();
    const Tensor unit_z = (x - Spread(mean_, x)).abs() / root;
    y_bound_ = kUnit * (6.5 * x.abs() * s + 9.5 * M * s + M * unit_z * s +
                        2 * Spread(b_, x).abs());
    const Tensor e =
        6 * kUnit * (1 + unit_z) * (x.abs() + M) * Spread(inverse_, x);
    const Tensor sum_error = (terms + 4) * kUnit * g.abs().sum(dims_);
    const Tensor sum_z_error = (terms + 4) * kUnit * (g * z).abs().sum(dims_) +
                               (g.abs() * e).sum(dims_);
    db_bound_ = sum_error;
    dw_bound_ = sum_z_error;
    const Tensor absolute = g.abs() + Spread(g_mean_, x).abs() +
                            z.abs() * Spread(gz_mean_, x).abs();
    dx_bound_ =
        s * ((7 * kUnit + 2 * kUnit + kUnit * M / root) * absolute +
             Spread(sum_error, x) / count_ + e * Spread(gz_mean_, x).abs() +
             z.abs() * Spread(sum_z_error, x) / count_);
  }

  // Half a unit in the last place of what has 16 bits, or of nothing.
  Tensor Rounded(const Tensor& bound, const Tensor& exact) const {
    return c_.dtype == at::kBFloat16 ? bound + 0x1.01p-8 * exact.abs()
           : c_.dtype == at::kHalf ? bound + 0x1.01p-11 * exact.abs() + 0x1p-25
                                   : bound;
  }

  absl::Status Compare(const Tensor& y) {
    TESSERA_RETURN_IF_ERROR(Expect(
        y.scalar_type() == c_.dtype && y.sizes() == x_.sizes(), "y's kind"));
    TESSERA_RETURN_IF_ERROR(
        Within(y, Part(y_), Part(Rounded(y_bound_, y_)), "y"));
    TESSERA_RETURN_IF_ERROR(Within(
        x_.grad(), Part(dx_), Part(Rounded(dx_bound_, dx_)), "gradient of x"));
    if (!c_.affine) return absl::OkStatus();
    // Each rank has its own gradients; their sum is that of all samples.
    Tensor dw = sync_->weight.grad().to(at::kDouble);
    Tensor db = sync_->bias.grad().to(at::kDouble);
    TESSERA_RETURN_IF_ERROR(group_->AllReduceSum(dw, {"test"}).Wait());
    TESSERA_RETURN_IF_ERROR(group_->AllReduceSum(db, {"test"}).Wait());
    TESSERA_RETURN_IF_ERROR(
        Within(dw, dw_, dw_bound_, "gradient of the weight"));
    return Within(db, db_, db_bound_, "gradient of the bias");
  }

  // Against those from before, of which the test knows them as they are.
  absl::Status CompareStatistics() {
    ++batches_;
    const double share =
        c_.cumulative ? 1.0 / static_cast<double>(batches_) : 0.1;
    const Tensor unbiased = var_ * count_ / (count_ - 1);
    const Tensor mean = before_mean_ * (1 - share) + mean_ * share;
    const Tensor var = before_var_ * (1 - share) + unbiased * share;
    TESSERA_RETURN_IF_ERROR(
        Within(sync_->running_mean, mean,
               kUnit * (share * most_ + before_mean_.abs() + mean.abs()),
               "running mean"));
    TESSERA_RETURN_IF_ERROR(Within(
        sync_->running_var, var,
        kUnit * (share * (2 * unbiased + 2.1 * most_ * unbiased.sqrt()) + var),
        "running variance"));
    before_mean_ = sync_->running_mean.to(at::kDouble);
    before_var_ = sync_->running_var.to(at::kDouble);
    return absl::OkStatus();
  }

  static constexpr double kEps = 1e-5;
  const Case c_;
  const std::shared_ptr<Communicator> group_;
  Sync sync_;
  Plain plain_;
  int64_t first_ = 0, mine_ = 0, batches_ = 0;
  Tensor all_x_, all_g_, x_, g_;
  std::vector<int64_t> dims_;
  double count_ = 0;
  Tensor mean_, var_, w_, b_, inverse_, s_, z_, g_mean_, gz_mean_, most_;
  Tensor y_, dx_, dw_, db_, y_bound_, dx_bound_, dw_bound_, db_bound_;
  Tensor before_mean_ = torch::zeros({kChannels}, at::kDouble);
  Tensor before_var_ = torch::ones({kChannels}, at::kDouble);
};

// Two batches and an evaluation. The statistics' bits.
template <typename Sync, typename Plain>
absl::StatusOr<std::string> RunCase(const Case& c,
                                    std::shared_ptr<Communicator> group) {
  at::manual_seed(7);
  Checked<Sync, Plain> checked(c, std::move(group));
  const auto run = [&]() -> absl::StatusOr<std::string> {
    TESSERA_RETURN_IF_ERROR(checked.Step());
    TESSERA_RETURN_IF_ERROR(checked.Step());
    const std::string bits = checked.statistics();
    TESSERA_RETURN_IF_ERROR(checked.Evaluate());
    return bits;
  };
  absl::StatusOr<std::string> bits = run();
  TESSERA_RETURN_IF_ERROR(Annotate(bits.status(), c.ToString()));
  return bits;
}

std::vector<Case> Cases(int ranks) {
  std::vector<Case> cases;
  for (const std::vector<int64_t>& samples :
       {std::vector<int64_t>{5, 5, 5}, {7, 2, 4}, {4, 0, 3}, {1, 1, 1}}) {
    const std::vector<int64_t> own(samples.begin(), samples.begin() + ranks);
    for (int dims = 1; dims <= 3; ++dims) cases.push_back({dims, own});
  }
  const std::vector<int64_t> own = cases[3].samples;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    cases.push_back({2, own, dtype});
  }
  cases.push_back({2, own, at::kFloat, /*offset=*/1000});
  cases.push_back({3, own});
  cases.back().last = true;
  cases.push_back({2, own});
  cases.back().last = true;
  cases.back().affine = false;
  cases.push_back({1, own});
  cases.back().tracks = false;
  cases.push_back({1, own});
  cases.back().cumulative = true;
  return cases;
}

absl::StatusOr<std::string> RunCases(
    const std::shared_ptr<Communicator>& group) {
  std::string bits;
  for (const Case& c : Cases(group->world_size())) {
    absl::StatusOr<std::string> of_case;
    const auto result = CatchTorch("case", [&] {
      of_case =
          c.dims == 1   ? RunCase<SyncBatchNorm1d, nn::BatchNorm1d>(c, group)
          : c.dims == 2 ? RunCase<SyncBatchNorm2d, nn::BatchNorm2d>(c, group)
                        : RunCase<SyncBatchNorm3d, nn::BatchNorm3d>(c, group);
    });
    TESSERA_RETURN_IF_ERROR(Annotate(result, c.ToString()));
    TESSERA_RETURN_IF_ERROR(of_case.status());
    absl::StrAppend(&bits, *of_case);
  }
  return bits;
}

TESSERA_RANK_FUNCTION(AllCases) { return RunCases(world.communicator()); }

// Ranks 0 and 2 are a group, and rank 1 is alone.
TESSERA_RANK_FUNCTION(CasesOfSubgroup) {
  TESSERA_ASSIGN_OR_RETURN(const auto group, world.communicator()->Split(
                                                 world.rank() % 2, {"pairs"}));
  if (group->world_size() == 1) return "";
  return RunCases(group);
}

TEST(SyncBatchNormTest, IsThatOfAllSamplesWithinTheBound) {
  for (const int ranks : {2, 3}) {
    const auto answers = RunOnRanks(ranks, "AllCases", "");
    EXPECT_THAT(answers[0], Not(HasSubstr("INTERNAL")));
    EXPECT_THAT(answers, Each(answers[0]));  // identical statistics
  }
}

TEST(SyncBatchNormTest, OfASubgroup) {
  const auto answers = RunOnRanks(3, "CasesOfSubgroup", "");
  EXPECT_THAT(answers[0], Not(HasSubstr("INTERNAL")));
  EXPECT_EQ(answers[0], answers[2]);
  EXPECT_EQ(answers[1], "");
}

}  // namespace
}  // namespace tessera
