// AdamW over one range of float32 masters in memory: ours by instruction set,
// libtorch's fused kernel and STREAM's triad on the same buffers, round by
// round in turn, in another order each time: what one leaves in the caches is
// the next one's to write back.
//
//   bazel run //benchmarks:adamw -- --numel=67108864 --threads=2 --rounds=15
//
// A step moves 28 bytes a parameter: the gradient is read, three others are
// read and written; 30 with a bfloat16 working copy written on the way, which
// "+copy" does in a pass of its own. The triad is counted as STREAM does, 12
// bytes, and with what the processor reads before it writes, 16.
//
// With --disk=FOLDER a file there is read and written beside all of it, as by
// an update whose states stream through a disk.
//
// Prints a table and one JSON line: medians; ratios of a round's times, their
// median and its 95 % interval (order statistics).
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "benchmarks/disk_traffic.h"
#include "benchmarks/flag_checks.h"
#include "benchmarks/triad.h"
#include "benchmarks/workers.h"
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

constexpr OptimizerOptions kOptions = {.lr = 1e-3, .weight_decay = 0.01};

struct Contestant {
  std::string name;
  double bytes = 0;  // of one element
  std::function<void(int64_t step)> run;
  std::vector<double> seconds = {};
};

struct Buffers {
  explicit Buffers(int64_t numel)
      : master(torch::randn({numel})),
        exp_avg(torch::randn({numel}).mul_(0.1)),
        exp_avg_sq(torch::rand({numel}).mul_(0.01)),
        gradient(torch::randn({numel})),
        working(torch::zeros({numel}, torch::kBFloat16)) {}
  StepRange Range(NumberType type) const {
    StepRange r;
    r.master = master.data_ptr<float>();
    r.states[0] = exp_avg.data_ptr();
    r.states[1] = exp_avg_sq.data_ptr();
    r.gradient = gradient.data_ptr<float>();
    r.numel = master.numel();
    r.working_type = type;
    r.working = working.data_ptr();
    return r;
  }
  at::Tensor master, exp_avg, exp_avg_sq, gradient, working;
};

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return (values[(n - 1) / 2] + values[n / 2]) / 2;
}

// The rank, from 0, from which and to which (from the other end) the median of
// the distribution lies between with at least 95 %.
size_t IntervalRank(size_t n) {
  double below = 0;  // of a binomial distribution of n and 1/2
  for (size_t k = 0; k < n / 2; ++k) {
    const double log_ways = std::lgamma(n + 1.0) - std::lgamma(k + 1.0) -
                            std::lgamma(static_cast<double>(n - k) + 1);
    below += std::exp(log_ways - static_cast<double>(n) * std::log(2.0));
    if (below > 0.025) return k == 0 ? 0 : k - 1;
  }
  return 0;
}

// Bytes of `ours` per second over those of `other`, in each round.
std::string Ratio(const Contestant& ours, const Contestant& other,
                  double other_bytes) {
  std::vector<double> ratios;
  for (size_t i = 0; i < ours.seconds.size(); ++i) {
    ratios.push_back(ours.bytes / ours.seconds[i] /
                     (other_bytes / other.seconds[i]));
  }
  std::sort(ratios.begin(), ratios.end());
  const size_t rank = IntervalRank(ratios.size());
  return absl::StrFormat("[%.3f, %.3f, %.3f]", ratios[rank], Median(ratios),
                         ratios[ratios.size() - 1 - rank]);
}

std::vector<Contestant> Contestants(const Buffers& b, Workers* workers) {
  std::vector<Contestant> all;
  const auto add_ours = [&](Isa isa, NumberType type, const char* suffix) {
    const StepRange range = b.Range(type);
    const double bytes = type == NumberType::kNone ? 28 : 30;
    all.push_back({absl::StrCat(IsaName(isa), suffix), bytes, [=](int64_t s) {
                     const auto c = CoefficientsOf(kOptions, s);
                     workers->Run(range.numel, [&](int64_t from, int64_t to) {
                       StepElements(Formula::kAdamW, Part(range, from, to), c,
                                    isa);
                     });
                   }});
  };
  add_ours(BestIsa(), NumberType::kNone, "");
  for (Isa isa : {Isa::kAvx2, Isa::kPortable}) {
    if (isa < BestIsa()) add_ours(isa, NumberType::kNone, "");
  }
  const auto libtorch = [b](int64_t s) {
    at::_fused_adamw_({b.master}, {b.gradient}, {b.exp_avg}, {b.exp_avg_sq}, {},
                      {torch::full({}, static_cast<double>(s))}, kOptions.lr,
                      kOptions.beta1, kOptions.beta2, kOptions.weight_decay,
                      kOptions.eps, /*amsgrad=*/false, /*maximize=*/false);
  };
  all.push_back({"libtorch", 28, libtorch});
  add_ours(BestIsa(), NumberType::kBFloat16, "_bf16");
  all.push_back({"libtorch+copy", 30, [=](int64_t s) {
                   libtorch(s);
                   b.working.copy_(b.master);
                 }});
  all.push_back(
      {"triad", 12, [=](int64_t) {
         workers->Run(b.master.numel(), [&](int64_t from, int64_t to) {
           Triad(b.master.data_ptr<float>() + from,
                 b.exp_avg.data_ptr<float>() + from,
                 b.gradient.data_ptr<float>() + from, 0.5f, to - from);
         });
       }});
  return all;
}

void Measure(std::vector<Contestant>* all, int rounds) {
  int64_t step = 0;
  std::mt19937 random(1);
  std::vector<Contestant*> order;
  for (Contestant& c : *all) order.push_back(&c);
  for (int round = -1; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (Contestant* contestant : order) {
      Contestant& c = *contestant;
      const auto begin = std::chrono::steady_clock::now();
      c.run(++step);
      const std::chrono::duration<double> took =
          std::chrono::steady_clock::now() - begin;
      if (round >= 0) c.seconds.push_back(took.count());
    }
  }
}

absl::Status MeasureBesideTraffic(const std::string& disk, int rounds,
                                  std::vector<Contestant>* all) {
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<DiskTraffic> traffic,
                           DiskTraffic::Start(disk));
  const auto begin = std::chrono::steady_clock::now();
  const int64_t before = traffic->bytes();
  Measure(all, rounds);
  const std::chrono::duration<double> took =
      std::chrono::steady_clock::now() - begin;
  std::printf(
      "beside %.2f GB/s to and from the disk\n",
      static_cast<double>(traffic->bytes() - before) * 1e-9 / took.count());
  return traffic->Stop();
}

void Print(const std::vector<Contestant>& all, int64_t numel, int threads) {
  std::vector<std::string> ms, rates, ratios;
  for (const Contestant& c : all) {
    const double median = Median(c.seconds);
    const double rate = c.bytes * static_cast<double>(numel) / median * 1e-9;
    std::printf("%-14s %8.2f ms %7.1f GB/s at %g bytes\n", c.name.c_str(),
                median * 1e3, rate, c.bytes);
    ms.push_back(absl::StrFormat("\"%s\": %.3f", c.name, median * 1e3));
    rates.push_back(absl::StrFormat("\"%s\": %.2f", c.name, rate));
    if (&c == &all[0]) continue;
    ratios.push_back(
        absl::StrFormat("\"%s\": %s", c.name, Ratio(all[0], c, c.bytes)));
  }
  ratios.push_back(
      absl::StrCat("\"triad_16\": ", Ratio(all[0], all.back(), 16)));
  std::printf(
      "{\"benchmark\": \"adamw\", \"numel\": %lld, \"threads\": %d, "
      "\"rounds\": %zu, \"isa\": \"%s\", \"median_ms\": {%s}, "
      "\"gb_per_s\": {%s}, \"rate_of_isa_over\": {%s}}\n",
      static_cast<long long>(numel), threads, all[0].seconds.size(),
      IsaName(BestIsa()), absl::StrJoin(ms, ", ").c_str(),
      absl::StrJoin(rates, ", ").c_str(), absl::StrJoin(ratios, ", ").c_str());
}

absl::Status Run(const std::vector<char*>& words) {
  TESSERA_RETURN_IF_ERROR(FlagsAlone(words));
  const int64_t numel = absl::GetFlag(FLAGS_numel);
  const int threads = absl::GetFlag(FLAGS_threads);
  const int rounds = absl::GetFlag(FLAGS_rounds);
  TESSERA_RETURN_IF_ERROR(AtLeast("numel", 1, numel));
  TESSERA_RETURN_IF_ERROR(AtLeast("threads", 1, threads));
  TESSERA_RETURN_IF_ERROR(AtLeast("rounds", 6, rounds));
  torch::NoGradGuard no_grad;
  at::set_num_threads(threads);
  const Buffers buffers(numel);
  Workers workers(threads);
  std::vector<Contestant> all = Contestants(buffers, &workers);
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
  absl::SetProgramUsageMessage("measures AdamW against libtorch and STREAM");
  const std::vector<char*> words = absl::ParseCommandLine(argc, argv);
  const absl::Status status =
      tessera::CatchTorch("libtorch", [&] { return tessera::Run(words); });
  if (!status.ok()) {
    std::fprintf(stderr, "adamw: %s\n", status.ToString().c_str());
  }
  return status.ok() ? 0 : 1;
}
