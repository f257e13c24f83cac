// Compares backends' collectives of local ranks in one run:
//
//   bazel-bin/benchmarks/collectives --world 2 --bytes 67108864 --dtype fp32
//     --ops all_gather,reduce_scatter,all_reduce --backends shm,gloo,copy
//
// --bytes is the size of the whole tensor (W shards). `copy` is the bare loop
// over memory that the ranks share: plain copies of all shards, or plain sums
// of them, with a barrier before and after. `shm` has its tensors in counted
// memory, as the engine does; `shm_staged` has them in libtorch's own. `gloo`
// is c10d's Gloo unchanged, `gloo_ordered` the engine's use of it. `pull` is no
// collective: all ranks read each other's shards at once (all_gather only).
//
// Rounds of all backends are interleaved. It prints one line of JSON for each
// operation and backend: the median over rounds of the slowest rank's time;
// gb_s is the bus bandwidth of nccl-tests: bytes * (W - 1) / W / time, twice
// that for all_reduce. Results are checked in the first round.
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "absl/flags/flag.h"
#include "absl/flags/usage.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/memory/memory.h"
#include "base/monotonic.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "benchmarks/bare_copy.h"
#include "benchmarks/program.h"
#include "benchmarks/rank_program.h"
#include "comm/all_gather_values.h"
#include "comm/gloo/gloo_transport.h"
#include "comm/group/group_communicator.h"
#include "comm/shard_server.h"
#include "comm/shm/map_peers.h"
#include "comm/shm/shm_transport.h"
#include "comm/watch/failure_domain.h"
#include "comm/world/world.h"
#include "torch/csrc/distributed/c10d/FileStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"

ABSL_FLAG(int64_t, bytes, 64 << 20, "Of the whole tensor, W shards.");
ABSL_FLAG(std::string, dtype, "fp32", "fp32, fp64, bf16 or fp16.");
ABSL_FLAG(std::vector<std::string>, ops,
          (std::vector<std::string>{"all_gather", "reduce_scatter",
                                    "all_reduce"}),
          "Of all_gather, reduce_scatter, all_reduce.");
ABSL_FLAG(std::vector<std::string>, backends,
          (std::vector<std::string>{"shm", "gloo", "copy"}),
          "Of shm, shm_staged, gloo, gloo_ordered, pull, copy.");
ABSL_FLAG(int, rounds, 21, "Rounds that are measured.");

namespace tessera {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

using Body = std::function<absl::Status(const std::string& op, Tensors&)>;

struct Backend {
  std::string name;
  bool counted_memory = true;
  Body run;
  Tensors tensors;
};

absl::StatusOr<at::ScalarType> DtypeOf(const std::string& name) {
  if (name == "fp32") return at::kFloat;
  if (name == "fp64") return at::kDouble;
  if (name == "bf16") return at::kBFloat16;
  if (name == "fp16") return at::kHalf;
  return absl::InvalidArgumentError(absl::StrCat(
      "--dtype: expected fp32, fp64, bf16 or fp16, got '", name, "'"));
}

absl::Status CheckFlags() {
  TESSERA_RETURN_IF_ERROR(AtLeast(1, FLAGS_bytes, FLAGS_rounds));
  for (const std::string& op : absl::GetFlag(FLAGS_ops)) {
    if (op == "all_gather" || op == "reduce_scatter" || op == "all_reduce") {
      continue;
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "--ops: expected all_gather, reduce_scatter or all_reduce, got '", op,
        "'"));
  }
  return absl::OkStatus();
}

// ---- backends

Body OverCommunicator(std::shared_ptr<Communicator> comm) {
  return [comm](const std::string& op, Tensors& t) {
    if (op == "all_gather")
      return comm->AllGather(t.shard, t.whole, {op}).Wait();
    if (op == "reduce_scatter") {
      return comm->ReduceScatterSum(t.whole, t.shard, {op}).Wait();
    }
    return comm->AllReduceSum(t.whole, {op}).Wait();
  };
}

template <typename Options, typename Connect>
absl::StatusOr<Body> OverTransport(const StorePtr& store, const World& world,
                                   const Connect& connect) {
  Options options;
  options.rank = world.rank();
  options.world_size = world.world_size();
  TESSERA_ASSIGN_OR_RETURN(
      options.domain, FailureDomain::Join(store, options, /*same_host=*/true));
  TESSERA_ASSIGN_OR_RETURN(auto transport, connect(store, options));
  TESSERA_ASSIGN_OR_RETURN(
      auto comm, GroupCommunicator::Create(options, {}, options.domain,
                                           std::move(transport)));
  return OverCommunicator(std::move(comm));
}

Body OverGloo(const StorePtr& store, int rank, int size) {
  auto options = c10d::ProcessGroupGloo::Options::create();
  options->devices.push_back(
      c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1"));
  options->threads = 2;
  auto group =
      c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
  return [group](const std::string& op, Tensors& t) {
    if (op == "all_gather") {
      group->_allgather_base(t.whole, t.shard)->wait();
    } else if (op == "reduce_scatter") {
      group->_reduce_scatter_base(t.shard, t.whole)->wait();
    } else {
      std::vector<at::Tensor> all = {t.whole};
      group->allreduce(all)->wait();
    }
    return absl::OkStatus();
  };
}

// Does an all-gather as pulls of every rank at once.
absl::StatusOr<Body> OverPulls(const World& world) {
  TESSERA_ASSIGN_OR_RETURN(auto made,
                           world.communicator()->ServeShards({"pulls"}));
  std::shared_ptr<ShardServer> server = std::move(made);
  server->SetVersion(0);
  return Body([server, offered = false](const std::string& op,
                                        Tensors& t) mutable -> absl::Status {
    if (op != "all_gather") {
      return absl::UnimplementedError("pull does all_gather only");
    }
    if (!std::exchange(offered, true)) server->Offer(0, t.shard);
    return server->Pull(0, 0, t.whole, {op}).Wait();
  });
}

absl::StatusOr<Backend> MakeBackend(const std::string& name, StorePtr store,
                                    const World& world) {
  Backend backend;
  backend.name = name;
  const int rank = world.rank(), size = world.world_size();
  store = c10::make_intrusive<c10d::PrefixStore>(name, store);
  if (name == "shm" || name == "shm_staged") {
    backend.counted_memory = name == "shm";
    TESSERA_ASSIGN_OR_RETURN(
        backend.run,
        OverTransport<GroupOptions>(store, world, ConnectShmTransport));
  } else if (name == "gloo_ordered") {
    TESSERA_ASSIGN_OR_RETURN(
        backend.run, OverTransport<GlooTransportOptions>(store, world,
                                                         ConnectGlooTransport));
  } else if (name == "gloo") {
    backend.run = OverGloo(store, rank, size);
  } else if (name == "pull") {
    TESSERA_ASSIGN_OR_RETURN(backend.run, OverPulls(world));
  } else if (name == "copy") {
    TESSERA_ASSIGN_OR_RETURN(
        auto memory, shm::MapPeers(*store, rank, size, absl::Seconds(30)));
    auto copy = std::make_shared<BareCopy>(std::move(memory), rank);
    backend.run = [copy](const std::string& op, Tensors& t) {
      return copy->Run(op, t);
    };
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        "--backends: expected shm, shm_staged, gloo, gloo_ordered, pull or "
        "copy, got '",
        name, "'"));
  }
  return backend;
}

// ---- measuring

absl::StatusOr<at::Tensor> MakeTensor(bool counted, int64_t numel,
                                      at::ScalarType dtype,
                                      CountedBuffer* memory) {
  if (!counted) return at::empty({numel}, dtype);
  // The size is at least that of buffers from the large buffers' source.
  const int64_t bytes = std::max<int64_t>(
      numel * static_cast<int64_t>(c10::elementSize(dtype)), kMappedFromBytes);
  TESSERA_ASSIGN_OR_RETURN(*memory, AllocateCounted(bytes, MemoryKind::kOther));
  return at::from_blob(memory->data(), {numel}, at::TensorOptions(dtype));
}

// Fills with small whole numbers, whose sums are exact.
void Fill(const std::string& op, int rank, Tensors& t) {
  t.whole.fill_(rank + 1);
  t.shard.fill_(rank + 1);
  if (op == "all_gather") t.whole.zero_();
  if (op == "all_gather") {
    t.whole.narrow(0, rank * t.shard.numel(), t.shard.numel()).fill_(rank + 1);
  }
}

bool Right(const std::string& op, int size, const Tensors& t) {
  if (op == "all_gather") {
    for (int r = 0; r < size; ++r) {
      if (!t.whole.narrow(0, r * t.shard.numel(), t.shard.numel())
               .eq(r + 1)
               .all()
               .item<bool>()) {
        return false;
      }
    }
    return true;
  }
  const at::Tensor& sum = op == "all_reduce" ? t.whole : t.shard;
  return sum.eq(size * (size + 1) / 2).all().item<bool>();
}

absl::Status Measure(const std::string& op, std::vector<Backend>& backends,
                     const World& world) {
  Communicator& comm = *world.communicator();
  const int size = world.world_size();
  const int rounds = absl::GetFlag(FLAGS_rounds);
  const int64_t bytes = absl::GetFlag(FLAGS_bytes);
  std::vector<std::vector<double>> ms(backends.size());
  for (int round = 0; round < rounds + 2; ++round) {
    for (size_t b = 0; b < backends.size(); ++b) {
      Tensors& t = backends[b].tensors;
      if (round == 0) Fill(op, world.rank(), t);
      if (round == 1) t.whole.zero_();  // sums of sums would overflow
      TESSERA_RETURN_IF_ERROR(comm.Barrier("round"));
      const absl::Duration begin = MonotonicNow();
      TESSERA_RETURN_IF_ERROR(backends[b].run(op, t));
      const double mine = absl::ToDoubleMilliseconds(MonotonicNow() - begin);
      TESSERA_ASSIGN_OR_RETURN(const auto all,
                               AllGatherValue(&comm, mine, {"time"}));
      if (round == 0 && !Right(op, size, t)) {
        return absl::InternalError(
            absl::StrCat(backends[b].name, ": wrong result of ", op));
      }
      if (round < 2) continue;  // the first rounds touch memory and caches
      ms[b].push_back(*std::max_element(all.begin(), all.end()));
    }
  }
  for (size_t b = 0; b < backends.size() && world.rank() == 0; ++b) {
    const double median = Median(ms[b]);
    const double factor = (op == "all_reduce" ? 2.0 : 1.0) * (size - 1) / size;
    std::printf(
        "{\"op\": \"%s\", \"backend\": \"%s\", \"world\": %d, \"bytes\": "
        "%lld, \"dtype\": \"%s\", \"ms\": %.4f, \"ms_min\": %.4f, "
        "\"gb_s\": %.3f}\n",
        op.c_str(), backends[b].name.c_str(), size,
        static_cast<long long>(bytes), absl::GetFlag(FLAGS_dtype).c_str(),
        median, *std::min_element(ms[b].begin(), ms[b].end()),
        factor * static_cast<double>(bytes) / median / 1e6);
  }
  return absl::OkStatus();
}

absl::StatusOr<StorePtr> MakeStore(const World& world) {
  std::string path = "/tmp/tessera-benchmark.XXXXXX";
  if (world.rank() == 0) {
    const int fd = mkstemp(path.data());
    if (fd < 0) return absl::UnavailableError("cannot make a file in /tmp");
    close(fd);
  }
  TESSERA_ASSIGN_OR_RETURN(
      auto paths, world.communicator()->AllGatherStrings(path, {"store"}));
  return StorePtr(
      c10::make_intrusive<c10d::FileStore>(paths[0], world.world_size()));
}

absl::Status Run(int argc, char** argv) {
  absl::SetProgramUsageMessage("measures collectives of local ranks");
  TESSERA_RETURN_IF_ERROR(ReadRankFlags(argc, argv));
  TESSERA_RETURN_IF_ERROR(CheckFlags());
  TESSERA_ASSIGN_OR_RETURN(const World* world, Init(&argc, argv));
  TESSERA_ASSIGN_OR_RETURN(const at::ScalarType dtype,
                           DtypeOf(absl::GetFlag(FLAGS_dtype)));
  if (world->world_size() < 2) {
    return absl::InvalidArgumentError("expected --world=2 or more");
  }
  TESSERA_ASSIGN_OR_RETURN(const StorePtr store, MakeStore(*world));
  const int64_t shard_numel = absl::GetFlag(FLAGS_bytes) /
                              static_cast<int64_t>(c10::elementSize(dtype)) /
                              world->world_size();
  std::vector<Backend> backends;
  for (const std::string& name : absl::GetFlag(FLAGS_backends)) {
    TESSERA_ASSIGN_OR_RETURN(Backend backend, MakeBackend(name, store, *world));
    Tensors& t = backend.tensors;
    TESSERA_ASSIGN_OR_RETURN(
        t.whole,
        MakeTensor(backend.counted_memory, shard_numel * world->world_size(),
                   dtype, &t.memory[0]));
    TESSERA_ASSIGN_OR_RETURN(
        t.shard,
        MakeTensor(backend.counted_memory, shard_numel, dtype, &t.memory[1]));
    backends.push_back(std::move(backend));
  }
  for (const std::string& op : absl::GetFlag(FLAGS_ops)) {
    TESSERA_RETURN_IF_ERROR(Measure(op, backends, *world));
  }
  return world->communicator()->Barrier("end");
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  const int result = tessera::RunRank("collectives", argc, argv, tessera::Run);
  std::fflush(stdout);
  std::_Exit(result);  // Gloo's group may block in its destructor
}
