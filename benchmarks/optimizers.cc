// Measures steps of optimizers over one range of float32 masters in memory:
// ours, by instruction set and by what gradients and states are kept in,
// libtorch's fused kernels where there are some, and STREAM's triad. All run on
// the same buffers, round by round in turn, in another order each time, since
// each one has to write back what the one before left in the caches.
//
//   bazel run //benchmarks:optimizers -- --numel=67108864 --threads=2
//   --rounds=15
//
// A step moves the bytes that are printed with it: for float32 AdamW 28 per
// parameter, the gradient read, three others read and written. "+passes" reads
// a bfloat16 gradient and writes a bfloat16 working copy in passes of their
// own, as "_bf16" does in one; so does "_remainders", whose masters are that
// copy and 16 bits besides. The triad is counted as STREAM does, 12 bytes,
// and with what the processor reads before it writes, 16.
//
// With --disk=FOLDER a file there is read and written in the background, as by
// an update whose states stream through a disk.
//
// Prints a table and one JSON line: medians; ratios of a round's times, their
// median and its 95 % interval (order statistics).
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "benchmarks/disk_traffic.h"
#include "benchmarks/program.h"
#include "benchmarks/workers.h"
#include "optim/algorithms/coefficients.h"
#include "optim/algorithms/optimizer_options.h"
#include "optim/kernels/element_step.h"

ABSL_FLAG(int64_t, numel, int64_t{1} << 26, "parameters");
ABSL_FLAG(int, threads, 2, "threads of all");
ABSL_FLAG(int, rounds, 15,
          "rounds that are measured, after one that is not; 6 or more, for the "
          "interval");
ABSL_FLAG(std::string, disk, "",
          "a folder: transfers of a file there go on meanwhile");

namespace tessera {
namespace {

struct Contestant {
  std::string name;
  double bytes = 0;  // of one element
  std::function<void(int64_t step)> run;
  std::vector<double> seconds = {};
};

OptimizerOptions OptionsOf(Algorithm algorithm) {
  OptimizerOptions options = {.lr = 1e-3, .weight_decay = 0.01};
  options.algorithm = algorithm;
  options.momentum = algorithm == Algorithm::kSgd ? 0.9 : 0;
  return options;
}

struct Buffers {
  explicit Buffers(int64_t numel)
      : master(torch::randn({numel})),
        exp_avg(torch::randn({numel}).mul_(0.1)),
        exp_avg_sq(torch::rand({numel}).mul_(0.01)),
        gradient(torch::randn({numel})),
        narrow_gradient(gradient.to(torch::kBFloat16)),
        working(torch::zeros({numel}, torch::kBFloat16)),
        remainders(torch::zeros({numel}, torch::kShort)) {
    for (at::Tensor& state : narrow_states) {
      state = torch::zeros({numel}, torch::kBFloat16);
    }
    for (at::Tensor& state : block_states) {
      state = torch::zeros({BytesOf(NumberType::kBlock8, numel)}, torch::kByte);
    }
  }
  StepRange Range(NumberType states, bool narrow) const {
    StepRange r;
    r.master = master.data_ptr();
    r.state_type = states;
    const at::Tensor wide[] = {exp_avg, exp_avg_sq};
    for (int s = 0; s < 2; ++s) {
      r.states[s] = (states == NumberType::kFloat32    ? wide[s]
                     : states == NumberType::kBFloat16 ? narrow_states[s]
                                                       : block_states[s])
                        .data_ptr();
    }
    r.gradient = (narrow ? narrow_gradient : gradient).data_ptr();
    r.numel = master.numel();
    if (!narrow) return r;
    r.gradient_type = r.working_type = NumberType::kBFloat16;
    r.working = working.data_ptr();
    return r;
  }
  // Masters in two halves, as offload/remainders.h has them.
  StepRange SplitRange() const {
    StepRange r = Range(NumberType::kFloat32, /*narrow=*/true);
    r.master = remainders.data_ptr();
    r.master_type = NumberType::kRemainder;
    return r;
  }
  at::Tensor master, exp_avg, exp_avg_sq, gradient, narrow_gradient, working,
      remainders;
  at::Tensor narrow_states[2], block_states[2];
};

// Returns the bytes read and written per element.
double BytesOfStep(const OptimizerOptions& options, NumberType states) {
  const int count = StatesOf(FormulaOf(options)).count;
  const double state = static_cast<double>(BytesOf(states, 64)) / 64;
  // This is a gradient of 4 bytes, or one of 2 and a working copy of 2.
  return 8 + 2 * count * state + 4;
}

// Returns the rank, from 0, of the lower end of the interval that contains the
// distribution's median with at least 95 %; the upper end has the same rank
// from the other end.
size_t IntervalRank(size_t n) {
  double below = 0;  // of a binomial distribution with n and 1/2
  for (size_t k = 0; k < n / 2; ++k) {
    const double log_ways = std::lgamma(n + 1.0) - std::lgamma(k + 1.0) -
                            std::lgamma(static_cast<double>(n - k) + 1);
    below += std::exp(log_ways - static_cast<double>(n) * std::log(2.0));
    if (below > 0.025) return k == 0 ? 0 : k - 1;
  }
  return 0;
}

// Returns the ratio of the bytes per second of `ours` to those of `other` in
// the rounds.
std::string Ratio(const Contestant& ours, const Contestant& other,
                  double other_bytes) {
  std::vector<double> ratios = Ratios(other.seconds, ours.seconds);
  for (double& ratio : ratios) ratio *= ours.bytes / other_bytes;
  std::sort(ratios.begin(), ratios.end());
  const size_t rank = IntervalRank(ratios.size());
  return absl::StrFormat("[%.3f, %.3f, %.3f]", ratios[rank], Median(ratios),
                         ratios[ratios.size() - 1 - rank]);
}

class Contest {
 public:
  Contest(const Buffers& buffers, Workers* workers)
      : b_(buffers), workers_(workers) {}

  std::vector<Contestant> All() {
    constexpr auto kAdamW = Algorithm::kAdamW;
    AddOurs(IsaName(BestIsa()), kAdamW);
    for (Isa isa : {Isa::kAvx2, Isa::kPortable}) {
      if (isa < BestIsa()) AddOurs(IsaName(isa), kAdamW, isa);
    }
    AddOurs("adamw_bf16", kAdamW, BestIsa(), NumberType::kFloat32, true);
    AddSteps("adamw_remainders", 26, OptionsOf(kAdamW), BestIsa(),
             b_.SplitRange());
    AddOurs("adamw_states16", kAdamW, BestIsa(), NumberType::kBFloat16);
    AddOurs("adamw_states8", kAdamW, BestIsa(), NumberType::kBlock8);
    AddOurs("sgd", Algorithm::kSgd);
    AddOurs("adagrad", Algorithm::kAdagrad);
    AddOurs("rmsprop", Algorithm::kRmsProp);
    AddOurs("lion", Algorithm::kLion);
    AddLibtorch();
    AddTriad();
    return std::move(all_);
  }

 private:
  void AddOurs(const std::string& name, Algorithm algorithm,
               Isa isa = BestIsa(), NumberType states = NumberType::kFloat32,
               bool narrow = false) {
    const OptimizerOptions options = OptionsOf(algorithm);
    AddSteps(name, BytesOfStep(options, states), options, isa,
             b_.Range(states, narrow));
  }

  void AddSteps(const std::string& name, double bytes,
                const OptimizerOptions& options, Isa isa,
                const StepRange& range) {
    const Formula formula = FormulaOf(options);
    Workers* const workers = workers_;
    all_.push_back(
        {name, bytes, [=](int64_t step) {
           const auto c = CoefficientsOf(options, step, 1, SeedOf(0, step));
           // Ranges are in blocks of 64 elements.
           workers->Run(range.numel / 64, [&](int64_t from, int64_t to) {
             StepElements(formula, Part(range, from * 64, to * 64), c, isa);
           });
         }});
  }

  void AddLibtorch() {
    const Buffers b = b_;
    const OptimizerOptions o = OptionsOf(Algorithm::kAdamW);
    const auto adamw = [b, o](int64_t s, const at::Tensor& gradient) {
      at::_fused_adamw_({b.master}, {gradient}, {b.exp_avg}, {b.exp_avg_sq}, {},
                        {torch::full({}, static_cast<double>(s))}, o.lr,
                        o.beta1, o.beta2, o.weight_decay, o.eps,
                        /*amsgrad=*/false, /*maximize=*/false);
    };
    all_.push_back({"libtorch", 28, [=](int64_t s) { adamw(s, b.gradient); }});
    all_.push_back({"libtorch+passes", 28, [=](int64_t s) {
                      b.gradient.copy_(b.narrow_gradient);
                      adamw(s, b.gradient);
                      b.working.copy_(b.master);
                    }});
    all_.push_back({"libtorch_sgd", 20, [=](int64_t) {
                      at::_fused_sgd_({b.master}, {b.gradient}, {b.exp_avg},
                                      /*weight_decay=*/0.01, /*momentum=*/0.9,
                                      /*lr=*/1e-3, /*dampening=*/0,
                                      /*nesterov=*/false, /*maximize=*/false,
                                      /*is_first_step=*/false);
                    }});
    all_.push_back({"libtorch_adagrad", 20, [=](int64_t s) {
                      at::_fused_adagrad_(
                          {b.master}, {b.gradient}, {b.exp_avg_sq},
                          {torch::full({}, static_cast<double>(s))},
                          /*lr=*/1e-3, /*lr_decay=*/0, /*weight_decay=*/0.01,
                          /*eps=*/1e-8, /*maximize=*/false);
                    }});
  }

  void AddTriad() {
    const Buffers b = b_;
    Workers* const workers = workers_;
    all_.push_back(
        {"triad", 12, [=](int64_t) {
           workers->Run(b.master.numel(), [&](int64_t from, int64_t to) {
             Triad(b.master.data_ptr<float>() + from,
                   b.exp_avg.data_ptr<float>() + from,
                   b.gradient.data_ptr<float>() + from, 0.5f, to - from);
           });
         }});
  }

  const Buffers& b_;
  Workers* const workers_;
  std::vector<Contestant> all_;
};

void Measure(std::vector<Contestant>* all, int rounds) {
  int64_t step = 0;
  std::mt19937 random(1);
  std::vector<Contestant*> order;
  for (Contestant& c : *all) order.push_back(&c);
  for (int round = -1; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (Contestant* contestant : order) {
      Contestant& c = *contestant;
      const double begin = SecondsOf(CLOCK_MONOTONIC);
      c.run(++step);
      const double took = SecondsOf(CLOCK_MONOTONIC) - begin;
      if (round >= 0) c.seconds.push_back(took);
    }
  }
}

absl::Status MeasureBesideTraffic(const std::string& disk, int rounds,
                                  std::vector<Contestant>* all) {
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<DiskTraffic> traffic,
                           DiskTraffic::Start(disk));
  const double begin = SecondsOf(CLOCK_MONOTONIC);
  const int64_t before = traffic->bytes();
  Measure(all, rounds);
  const double took = SecondsOf(CLOCK_MONOTONIC) - begin;
  std::printf("beside %.2f GB/s to and from the disk\n",
              static_cast<double>(traffic->bytes() - before) * 1e-9 / took);
  return traffic->Stop();
}

void Print(const std::vector<Contestant>& all, int64_t numel, int threads) {
  std::vector<std::string> ms, of_triad, times;
  for (const Contestant& c : all) {
    const double median = Median(c.seconds);
    const double rate = c.bytes * static_cast<double>(numel) / median * 1e-9;
    std::printf("%-17s %8.2f ms %7.1f GB/s at %g bytes\n", c.name.c_str(),
                median * 1e3, rate, c.bytes);
    ms.push_back(absl::StrFormat("\"%s\": %.3f", c.name, median * 1e3));
    of_triad.push_back(
        absl::StrFormat("\"%s\": %s", c.name, Ratio(c, all.back(), 16)));
    if (&c == &all[0]) continue;
    // With equal bytes only the times matter.
    Contestant first = all[0], other = c;
    first.bytes = 1;
    times.push_back(
        absl::StrFormat("\"%s\": %s", c.name, Ratio(first, other, 1)));
  }
  std::printf(
      "{\"benchmark\": \"optimizers\", \"numel\": %lld, \"threads\": %d, "
      "\"rounds\": %zu, \"isa\": \"%s\", \"median_ms\": {%s}, "
      "\"rate_over_triad_16\": {%s}, \"time_over_adamw\": {%s}}\n",
      static_cast<long long>(numel), threads, all[0].seconds.size(),
      IsaName(BestIsa()), absl::StrJoin(ms, ", ").c_str(),
      absl::StrJoin(of_triad, ", ").c_str(),
      absl::StrJoin(times, ", ").c_str());
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage(
      "measures optimizers against libtorch and STREAM");
  TESSERA_RETURN_IF_ERROR(ReadFlags(argc, argv));
  TESSERA_RETURN_IF_ERROR(AtLeast(1, FLAGS_numel, FLAGS_threads));
  TESSERA_RETURN_IF_ERROR(AtLeast(6, FLAGS_rounds));
  const int64_t numel = absl::GetFlag(FLAGS_numel);
  const int threads = absl::GetFlag(FLAGS_threads);
  const int rounds = absl::GetFlag(FLAGS_rounds);
  torch::NoGradGuard no_grad;
  at::set_num_threads(threads);
  const Buffers buffers(numel);
  Workers workers(threads);
  std::vector<Contestant> all = Contest(buffers, &workers).All();
  const std::string disk = absl::GetFlag(FLAGS_disk);
  if (disk.empty()) {
    Measure(&all, rounds);
  } else {
    TESSERA_RETURN_IF_ERROR(MeasureBesideTraffic(disk, rounds, &all));
  }
  Print(all, numel, threads);
  return absl::OkStatus();
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  return tessera::EndOf("optimizers", tessera::CatchTorch("libtorch", [&] {
                          return tessera::Run(argc, argv);
                        }));
}
