#include "engine/plan/rates.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "ATen/ops/empty.h"
#include "ATen/ops/mm.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "absl/time/time.h"
#include "base/memory/memory.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "comm/all_gather_values.h"
#include "comm/capabilities.h"
#include "comm/shard_server.h"
#include "engine/build/tiers.h"

namespace tessera {
namespace {

constexpr int kTries = 7;
constexpr int64_t kMatrix = 512;                  // rows and columns
constexpr int64_t kArrayNumel = 8 << 20;          // larger than caches
constexpr int64_t kSmall = 64, kLarge = 2 << 20;  // elements of collectives
constexpr int kTurns = 6;                         // 48 MiB of the large ones

// Each try begins on all ranks at once, so that they share what they share in
// training. In order of time.
absl::StatusOr<std::vector<double>> Tries(
    Communicator* comm, const std::function<absl::Status()>& work) {
  std::vector<double> seconds;
  for (int i = 0; i < kTries; ++i) {
    TESSERA_RETURN_IF_ERROR(comm->Barrier("measuring rates"));
    const absl::Duration start = MonotonicNow();
    TESSERA_RETURN_IF_ERROR(work());
    seconds.push_back(
        std::max(absl::ToDoubleSeconds(MonotonicNow() - start), 1e-9));
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds;
}

// Returns the shortest time, for work that a rank does alone: delays by other
// work do not count.
absl::StatusOr<double> Shortest(Communicator* comm,
                                const std::function<absl::Status()>& work) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                           Tries(comm, work));
  return seconds[0];
}

// Returns the median time, for collectives, which wait for the slowest rank
// each time.
absl::StatusOr<double> Median(Communicator* comm,
                              const std::function<absl::Status()>& work) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<double> seconds,
                           Tries(comm, work));
  return seconds[seconds.size() / 2];
}

absl::StatusOr<double> ProductsPerSecond(Communicator* comm,
                                         at::ScalarType dtype) {
  const at::Tensor a = at::ones({kMatrix, kMatrix}, dtype);
  at::Tensor product = at::empty({kMatrix, kMatrix}, dtype);
  TESSERA_ASSIGN_OR_RETURN(const double seconds, Shortest(comm, [&] {
                             at::mm_out(product, a, a);
                             return absl::OkStatus();
                           }));
  return static_cast<double>(2 * kMatrix * kMatrix * kMatrix) / seconds;
}

absl::StatusOr<double> MovedPerSecond(Communicator* comm) {
  at::Tensor to = at::zeros({kArrayNumel});
  const at::Tensor from = at::ones({kArrayNumel});
  TESSERA_ASSIGN_OR_RETURN(const double seconds, Shortest(comm, [&] {
                             to.add_(from);
                             return absl::OkStatus();
                           }));
  return static_cast<double>(3 * kArrayNumel) * sizeof(float) / seconds;
}

// With their nodes in a graph, and one operator for each in backward.
absl::StatusOr<double> SecondsPerOperator(Communicator* comm) {
  constexpr int kOperators = 200;
  const at::AutoGradMode recorded(true);
  const at::Tensor x = at::ones({kSmall});
  TESSERA_ASSIGN_OR_RETURN(const double seconds, Shortest(comm, [&] {
                             at::Tensor y =
                                 at::ones({kSmall}).requires_grad_(true);
                             for (int i = 0; i < kOperators; ++i) y = y * x;
                             y.sum().backward();
                             return absl::OkStatus();
                           }));
  return seconds / (2 * kOperators);
}

// What ranks take longer that meet in a collective between products: a hot loop
// of collectives would not show what it costs to wake up for one, and to wait
// for the others.
class BetweenProducts {
 public:
  explicit BetweenProducts(Communicator* comm)
      : comm_(comm),
        factor_(at::ones({kRows, kRows})),
        product_(at::empty({kRows, kRows})) {}

  absl::StatusOr<double> Seconds(
      const std::function<absl::Status()>& collective) {
    if (alone_ == 0) {
      TESSERA_ASSIGN_OR_RETURN(alone_, Times([] { return absl::OkStatus(); }));
    }
    TESSERA_ASSIGN_OR_RETURN(const double both, Times(collective));
    return std::max(0.0, both - alone_) / kTimes;
  }

 private:
  static constexpr int kTimes = 5;
  static constexpr int64_t kRows = 256;

  absl::StatusOr<double> Times(const std::function<absl::Status()>& f) {
    return Median(comm_, [&] {
      for (int i = 0; i < kTimes; ++i) {
        at::mm_out(product_, factor_, factor_);
        TESSERA_RETURN_IF_ERROR(f());
      }
      return absl::OkStatus();
    });
  }

  Communicator* const comm_;
  const at::Tensor factor_;
  at::Tensor product_;
  double alone_ = 0;
};

using Collective =
    std::function<CommFuture(const at::Tensor& whole, const at::Tensor& shard)>;

// Through a small one and a large one. Large ones take turns, so that none
// finds its memory in a cache, and shards lie in their wholes, as in training.
absl::StatusOr<RateLine> LineOf(Communicator* comm, BetweenProducts* between,
                                const Collective& collective) {
  double seconds[2];
  double bytes[2];
  const int64_t numels[2] = {kSmall, kLarge};
  for (int i = 0; i < 2; ++i) {
    const int64_t shard_numel =
        std::max<int64_t>(1, numels[i] / comm->world_size());
    std::vector<at::Tensor> wholes;
    for (int k = 0; k < (i == 0 ? 1 : kTurns); ++k) {
      wholes.push_back(at::zeros({shard_numel * comm->world_size()}));
    }
    bytes[i] = static_cast<double>(wholes[0].nbytes());
    size_t turn = 0;
    TESSERA_ASSIGN_OR_RETURN(seconds[i], between->Seconds([&] {
      const at::Tensor& whole = wholes[++turn % wholes.size()];
      const at::Tensor shard =
          whole.narrow(0, comm->rank() * shard_numel, shard_numel);
      return collective(whole, shard).Wait();
    }));
  }
  RateLine line;
  if (bytes[1] > bytes[0]) {
    line.seconds_per_byte =
        std::max(0.0, seconds[1] - seconds[0]) / (bytes[1] - bytes[0]);
  }
  line.seconds = seconds[0];
  return line;
}

// What the same products take longer with a large collective under way, as part
// of what that takes alone, `line`.
absl::StatusOr<double> Exposed(Communicator* comm, const RateLine& line,
                               const Collective& collective) {
  const int64_t shard_numel = std::max<int64_t>(1, kLarge / comm->world_size());
  const at::Tensor whole = at::zeros({shard_numel * comm->world_size()});
  const at::Tensor shard =
      whole.narrow(0, comm->rank() * shard_numel, shard_numel);
  const at::Tensor a = at::ones({kMatrix, kMatrix});
  at::Tensor product = at::empty({kMatrix, kMatrix});
  const double alone = line.Of(static_cast<int64_t>(whole.nbytes()));
  if (alone <= 0) return 0;
  TESSERA_ASSIGN_OR_RETURN(const double one, Median(comm, [&] {
                             at::mm_out(product, a, a);
                             return absl::OkStatus();
                           }));
  const int products = static_cast<int>(std::min(100.0, 1 + 2 * alone / one));
  TESSERA_ASSIGN_OR_RETURN(const double both, Median(comm, [&] {
                             const CommFuture running =
                                 collective(whole, shard);
                             for (int i = 0; i < products; ++i)
                               at::mm_out(product, a, a);
                             return running.Wait();
                           }));
  return std::clamp((both - products * one) / alone, 0.0, 1.0);
}

// Measures gathers in which ranks read each other's shards.
absl::Status MeasurePulls(Communicator* comm, BetweenProducts* between,
                          Rates* rates) {
  TESSERA_ASSIGN_OR_RETURN(const std::unique_ptr<ShardServer> server,
                           comm->ServeShards({"measuring rates"}));
  for (const int64_t numel : {kSmall, kLarge}) {  // keys
    server->Offer(
        numel, at::zeros({std::max<int64_t>(1, numel / comm->world_size())}));
  }
  server->SetVersion(0);
  const Collective pull = [&](const at::Tensor& whole, const at::Tensor&) {
    const int64_t key =
        whole.numel() > kSmall * comm->world_size() ? kLarge : kSmall;
    return server->Pull(key, 0, whole, {"measuring rates"});
  };
  TESSERA_ASSIGN_OR_RETURN(rates->gather, LineOf(comm, between, pull));
  TESSERA_ASSIGN_OR_RETURN(rates->gather_exposed,
                           Exposed(comm, rates->gather, pull));
  return comm->Barrier("measuring rates");  // nobody reads any more
}

}  // namespace

absl::StatusOr<Rates> MeasureRates(Communicator* comm) {
  const TorchScope plain;
  Rates rates;
  rates.world_size = comm->world_size();
  TESSERA_ASSIGN_OR_RETURN(rates.flops_per_second,
                           ProductsPerSecond(comm, at::kFloat));
  TESSERA_ASSIGN_OR_RETURN(rates.half_flops_per_second,
                           ProductsPerSecond(comm, at::kBFloat16));
  TESSERA_ASSIGN_OR_RETURN(rates.bytes_per_second, MovedPerSecond(comm));
  TESSERA_ASSIGN_OR_RETURN(rates.seconds_per_operator,
                           SecondsPerOperator(comm));
  if (comm->world_size() > 1) {
    const CommTag tag = {"measuring rates"};
    BetweenProducts between(comm);
    TESSERA_ASSIGN_OR_RETURN(
        rates.all_gather,
        LineOf(comm, &between, [&](const auto& whole, const auto& own) {
          return comm->AllGather(own, whole, tag);
        }));
    TESSERA_ASSIGN_OR_RETURN(
        rates.reduce_scatter,
        LineOf(comm, &between, [&](const auto& whole, const auto& own) {
          return comm->ReduceScatterSum(whole, own, tag);
        }));
    const Collective sum = [&](const auto& whole, const auto&) {
      return comm->AllReduceSum(whole, tag);
    };
    TESSERA_ASSIGN_OR_RETURN(rates.all_reduce, LineOf(comm, &between, sum));
    TESSERA_ASSIGN_OR_RETURN(rates.exposed,
                             Exposed(comm, rates.all_reduce, sum));
    rates.gather = rates.all_gather;
    rates.gather_exposed = rates.exposed;
    if (comm->capabilities().prefers_pulls) {
      TESSERA_RETURN_IF_ERROR(MeasurePulls(comm, &between, &rates));
    }
  }
  TESSERA_ASSIGN_OR_RETURN(
      const auto all, AllGatherValue(comm, rates, CommTag{"measured rates"}));
  return all[0];
}

absl::Status MeasureDisk(const SwapOptions& disk, Communicator* comm,
                         Rates* rates) {
  constexpr char kWhat[] = "measuring the disk";
  constexpr int64_t kBytes = 64 << 20;
  absl::StatusOr<std::shared_ptr<SwapFile>> file =
      OpenSwapFile(disk, comm->rank(), "nvme_path");
  auto extent = file.ok() ? (*file)->Allocate(kBytes)
                          : absl::StatusOr<SwapExtent>(file.status());
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(extent.status(), kWhat));
  auto memory = AllocateCounted(kBytes, MemoryKind::kOther, /*zeroed=*/true);
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(memory.status(), kWhat));
  // The first time a block is written the file system has to find it.
  double seconds[3];
  for (int i = 0; i < 3; ++i) {
    TESSERA_RETURN_IF_ERROR(comm->Barrier(kWhat));
    const absl::Duration start = MonotonicNow();
    const SwapFuture moved =
        i < 2 ? (*file)->Write(*extent, 0, memory->data(), kBytes, kWhat)
              : (*file)->Read(*extent, 0, memory->data(), kBytes, kWhat);
    TESSERA_RETURN_IF_ERROR(comm->AgreeOk(moved.Wait(), kWhat));
    seconds[i] = std::max(absl::ToDoubleSeconds(MonotonicNow() - start), 1e-9);
  }
  rates->disk_written_per_second = static_cast<double>(kBytes) / seconds[1];
  rates->disk_read_per_second = static_cast<double>(kBytes) / seconds[2];
  TESSERA_ASSIGN_OR_RETURN(const auto all,
                           AllGatherValue(comm, *rates, CommTag{kWhat}));
  for (const Rates& each : all) {
    rates->disk_written_per_second =
        std::min(rates->disk_written_per_second, each.disk_written_per_second);
    rates->disk_read_per_second =
        std::min(rates->disk_read_per_second, each.disk_read_per_second);
  }
  return absl::OkStatus();
}

// A ring's: all but a rank's own part goes once through each link, twice for a
// sum that all ranks get.
Rates OverNetwork(Rates rates, int ranks, double bytes_per_second,
                  double latency_seconds) {
  const double steps = ranks - 1;
  rates.all_gather = {steps * latency_seconds,
                      steps / ranks / bytes_per_second};
  rates.reduce_scatter = rates.all_gather;
  rates.all_reduce = {2 * steps * latency_seconds,
                      2 * steps / ranks / bytes_per_second};
  rates.gather = rates.all_gather;
  rates.exposed = rates.gather_exposed = 0;
  rates.world_size = ranks;
  return rates;
}

Rates AtWorldSize(Rates rates, int ranks) {
  if (rates.world_size == 1) return rates;
  const double before = rates.world_size - 1, now = ranks - 1;
  for (RateLine* line : {&rates.all_gather, &rates.reduce_scatter,
                         &rates.all_reduce, &rates.gather}) {
    line->seconds *= now / before;
    line->seconds_per_byte *= (now / ranks) / (before / rates.world_size);
  }
  rates.world_size = ranks;
  return rates;
}

}  // namespace tessera
