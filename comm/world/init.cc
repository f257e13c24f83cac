#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/status.h"
#include "base/system/process_defaults.h"
#include "base/system/process_end.h"
#include "base/thread/deadline.h"
#include "base/torch/deterministic.h"
#include "base/torch_guard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "comm/comm_thread.h"
#include "comm/connect/job_secret.h"
#include "comm/device/open_backend.h"
#include "comm/group/self_communicator.h"
#include "comm/launch/cpus.h"
#include "comm/launch/job.h"
#include "comm/launch/launcher.h"
#include "comm/nccl/nccl_environment.h"
#include "comm/nccl/nccl_transport.h"
#include "comm/record/comm_log.h"
#include "comm/record/hang_dump.h"
#include "comm/rendezvous/abandonable.h"
#include "comm/rendezvous/hosted_store.h"
#include "comm/rendezvous/local_address.h"
#include "comm/rendezvous/rendezvous.h"
#include "comm/rendezvous/start_watch.h"
#include "comm/serve/retired_servers.h"
#include "comm/world/backend_choice.h"
#include "comm/world/build_stamp.h"
#include "comm/world/make_group.h"
#include "comm/world/rank_processors.h"
#include "comm/world/world.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"

namespace tessera {
namespace {

// How long a rank that leaves goes on serving shards to others: not so long
// that these wait for it in vain in a collective.
constexpr absl::Duration kRetiredGrace = absl::Seconds(5);

// After the deadline: to find who is gone, and to tell the others.
constexpr absl::Duration kLastWords = absl::Milliseconds(1500);

using StorePtr = c10::intrusive_ptr<c10d::Store>;

ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);
World* g_world ABSL_GUARDED_BY(g_mutex) = nullptr;

// Hosts the store, runs the ranks, and ends this process.
absl::Status Launch(const std::vector<std::string>& argv,
                    const JobFlags& flags) {
  TESSERA_ASSIGN_OR_RETURN(HostedStore store, HostedStore::Start(*flags.world));
  LaunchOptions launch;
  launch.world_size = *flags.world;
  launch.prefix_output = flags.prefix_output;
  launch.argv = argv;
  launch.meeting = store.Environment();
  launch.signal_grace = flags.grace;
  launch.on_end = [&](int rank, bool ok, const std::string& how) {
    // A rank that came and ended well does not concern others' start-up.
    if (ok && store.HasCome(rank)) return;
    store.Fail(
        absl::StrCat("rank ", rank, " ", how, " before the job had started"));
  };
  TESSERA_ASSIGN_OR_RETURN(const int code, LaunchAndWait(launch));
  // Not exit(): the store's threads are running, and what the program would do
  // at its end is the ranks' business.
  EndProcess(ProcessEnd::kLaunched, code);
  return absl::CancelledError(
      absl::StrCat("the ranks of --world have ended with code ", code));
}

absl::Status CheckOptions(const WorldOptions& options) {
  TESSERA_RETURN_IF_ERROR(CheckBackendName(options.backend));
  if (!(options.startup_timeout > absl::ZeroDuration()) ||
      !(options.collective_timeout > absl::ZeroDuration())) {
    return absl::InvalidArgumentError(absl::StrCat(
        "WorldOptions: expected timeouts above 0, got startup_timeout ",
        absl::FormatDuration(options.startup_timeout), ", collective_timeout ",
        absl::FormatDuration(options.collective_timeout)));
  }
  return CheckNcclEnvironment(options.nccl_environment);
}

// What this rank tells the others, except its address.
RankInfo OwnInfo(const WorldOptions& options) {
  RankInfo info;
  info.host = HostId();
  info.gpus = VisibleGpus();
  info.network = NetworkId();
  info.cpus = AllowedCpus();
  info.memory_group = options.memory_group;
  info.build = BuildStamp();
  info.build_id = BuildId();
  return info;
}

GroupPlan PlanOf(const Job& job, const WorldOptions& options,
                 const std::vector<std::string>& infos) {
  GroupPlan plan;
  plan.options.rank = job.rank;
  plan.options.world_size = job.world_size;
  plan.options.collective_timeout = options.collective_timeout;
  plan.options.announce_grace = options.announce_grace;
  for (const std::string& text : infos) {
    plan.infos.push_back(RankInfo::Decode(text));
  }
  plan.backend = options.backend;
  plan.device = DeviceOf(plan.infos, job.rank);
  plan.ordered_sums = options.ordered_sums;
  return plan;
}

// How the ranks connect; owns all that it uses, since it may be abandoned.
struct Connecting {
  RendezvousPlace place;
  GroupPlan plan;
  StorePtr store;
  absl::Duration startup_timeout;
  Deadline deadline;

  absl::StatusOr<std::shared_ptr<Communicator>> Run() const;
  absl::Status TooLate(const StorePtr& client, StartWatch& watch,
                       const absl::Status& status) const;
  void Tell(const StorePtr& client, const absl::Status& why) const;
  std::string Limit() const {
    return absl::StrCat("within the start-up timeout of ",
                        absl::FormatDuration(startup_timeout));
  }
};

// Ends at the deadline, or when the launcher or a rank says why the start has
// failed; but hangs as long as the store does not answer.
absl::StatusOr<std::shared_ptr<Communicator>> Connecting::Run() const {
  // `store` answers nothing else while a transport waits in it.
  TESSERA_ASSIGN_OR_RETURN(const StorePtr client,
                           CatchTorch("store", [&] { return store->clone(); }));
  auto made = std::make_shared<std::shared_ptr<Communicator>>();
  auto work = [made, plan = plan, store = store, client]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(
        *made,
        MakeGroup(plan, c10::make_intrusive<c10d::PrefixStore>("comm/0", store),
                  c10::make_intrusive<c10d::PrefixStore>("comm/0", client)));
    // Nobody goes on (and perhaps ends, and with it the store) before all are
    // connected.
    return (*made)->Barrier("start-up");
  };
  StartWatch watch(client, plan.options.rank, plan.options.world_size);
  auto stop = [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(watch.Look());
    // Find out which ranks are gone when the deadline is near.
    if (deadline.Left() <= StartWatch::kSilence) {
      TESSERA_RETURN_IF_ERROR(watch.NoteCounts());
    }
    if (!deadline.HasPassed()) return absl::OkStatus();
    return absl::DeadlineExceededError("");
  };
  const absl::Status status = RunAbandonable(work, stop);
  if (status.ok()) return *made;
  if (deadline.HasPassed()) return TooLate(client, watch, status);
  const absl::Status why = WithStartFailure(status, *client);
  Tell(client, why);
  return why;
}

// The others would wait for this rank in vain.
void Connecting::Tell(const StorePtr& client, const absl::Status& why) const {
  PutFailure(*client, why, IsStoreHost(place, plan.options.rank));
}

// Names the ranks that are gone, where nobody else has said why it is late.
absl::Status Connecting::TooLate(const StorePtr& client, StartWatch& watch,
                                 const absl::Status& status) const {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<int> silent, watch.SilentRanks());
  std::string text = absl::StrCat("rank ", plan.options.rank,
                                  " is not connected with all of the ",
                                  plan.options.world_size, " ranks ", Limit());
  if (silent.empty()) {
    absl::StrAppend(&text, "; all of them are alive");
  } else {
    absl::StrAppend(&text, "; no sign of life from ",
                    silent.size() == 1 ? "rank " : "ranks ",
                    absl::StrJoin(silent, ", "), ": ended, or stopped");
  }
  if (!status.message().empty()) {
    absl::StrAppend(&text, "; here: ", status.message());
  }
  const absl::Status late = absl::DeadlineExceededError(text);
  Tell(client, late);
  return late;
}

// Ends within kLastWords after the deadline, whatever has stopped.
absl::StatusOr<std::shared_ptr<Communicator>> Connect(Connecting connecting) {
  connecting.plan.options.connect_timeout =
      std::max(connecting.deadline.Left(), absl::Seconds(1));
  auto made = std::make_shared<std::shared_ptr<Communicator>>();
  auto work = [made, connecting]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(*made, connecting.Run());
    return absl::OkStatus();
  };
  const std::string phase = absl::StrCat(
      ", while rank ", connecting.plan.options.rank, " of ",
      connecting.plan.options.world_size, " connects with the other ranks");
  auto stop = [&]() -> absl::Status {
    if (!(connecting.deadline + kLastWords).HasPassed()) {
      return absl::OkStatus();
    }
    return absl::DeadlineExceededError(absl::StrCat(
        SilentStore(connecting.place), " ", connecting.Limit(), phase));
  };
  const absl::Status status = RunAbandonable(work, stop);
  if (status.ok()) return *made;
  if (!absl::StartsWith(status.message(), kStoreError)) return status;
  return absl::Status(status.code(), absl::StrCat(status.message(), phase));
}

}  // namespace

class WorldBuilder {
 public:
  static absl::StatusOr<World*> Build(const Job& job,
                                      const WorldOptions& options);
  static void SetPlanWorld(int ranks, World* world) {
    world->plan_world_ = ranks;
  }

 private:
  static absl::Status SetDevice(const std::vector<RankInfo>& infos,
                                World* world);
};

absl::Status WorldBuilder::SetDevice(const std::vector<RankInfo>& infos,
                                     World* world) {
  const int gpu =
      GpuOf(infos, world->rank_, world->options_.backend, BuiltWithNccl());
  if (gpu < 0) return absl::OkStatus();
  world->device_ = {at::kCUDA, static_cast<c10::DeviceIndex>(gpu)};
  return CatchTorch("device", [&] {
    c10::impl::VirtualGuardImpl(at::kCUDA).setDevice(world->device_);
  });
}

// Why in this order. Ranks that have only an address in common cannot agree on
// anything before they meet, so the choice of a backend must need no agreement:
// each rank tells what it has (host, network, GPUs, processors), reads the same
// of all others, and computes the same plan. Only then is anything connected,
// and the start ends with a barrier: a rank that went on alone could end, and
// take the store with it, while others still connect through it. libtorch is
// mute meanwhile, since its own words about a peer that is not there yet would
// come before ours, and say less; if the start fails they stay unsaid.
absl::StatusOr<World*> WorldBuilder::Build(const Job& job,
                                           const WorldOptions& options) {
  auto world = std::make_unique<World>();
  world->options_ = options;
  world->rank_ = job.rank;
  world->world_size_ = job.world_size;
  if (job.world_size == 1) {
    world->comm_ = MakeSelfCommunicator();
    const std::vector<RankInfo> own = {OwnInfo(options)};
    TESSERA_RETURN_IF_ERROR(SetDevice(own, world.get()));
    TESSERA_RETURN_IF_ERROR(SetThreads(own, 0));
    return world.release();
  }
  const Deadline deadline = Deadline::After(options.startup_timeout);
  TESSERA_ASSIGN_OR_RETURN(RendezvousPlace place,
                           ParseRendezvous(job.rendezvous));
  place.hosted_by_launcher = job.store_hosted;
  place.is_tcp_store = job.store_hosted && job.launcher == "torchrun";
  if (!job.attempt.empty())
    absl::StrAppend(&place.key_prefix, "/", job.attempt);
  const auto info = [options, place] {
    RankInfo own = OwnInfo(options);
    if (!place.host.empty()) own.address = AddressToward(place.host);
    return own.Encode();
  };
  MuteTorch(true);  // for good if this fails
  TESSERA_ASSIGN_OR_RETURN(
      Meeting meeting, Meet(place, job.rank, job.world_size, info, deadline));
  GroupPlan plan = PlanOf(job, options, meeting.infos);
  const absl::Status builds = CheckBuilds(plan.infos);
  if (!builds.ok()) {
    // A rank that has not read all of it yet learns of it in another way.
    PutFailure(*meeting.store, builds, IsStoreHost(place, job.rank));
    return builds;
  }
  if (job.rank == 0 && !OtherFiles(plan.infos).empty()) {
    TESSERA_LOG(WARNING) << OtherFiles(plan.infos);
  }
  if (options.numa_binding) BindToNodes(job.rank, &plan.infos);
  TESSERA_RETURN_IF_ERROR(SetDevice(plan.infos, world.get()));
  TESSERA_RETURN_IF_ERROR(SetThreads(plan.infos, job.rank));
  const Neighbours neighbours = FindNeighbours(plan.infos, job.rank);
  world->local_rank_ = neighbours.local_rank;
  world->local_world_size_ = neighbours.local_world_size;
  TESSERA_ASSIGN_OR_RETURN(
      world->comm_,
      Connect({place, plan, meeting.store, options.startup_timeout, deadline}));
  MuteTorch(false);
  SetLogRank(job.rank, job.world_size);
  return world.release();
}

const World* World::Current() {
  absl::MutexLock lock(&g_mutex);
  return g_world;
}

absl::StatusOr<const World*> Init(int* argc, char** argv,
                                  WorldOptions options) {
  OpenStandardDescriptors();
  if (World::Current() != nullptr) {
    return absl::FailedPreconditionError("Init was called before");
  }
  TESSERA_RETURN_IF_ERROR(CheckOptions(options));
  SurviveSignals();
  const std::vector<std::string> whole_argv(argv, argv + *argc);
  TESSERA_ASSIGN_OR_RETURN(const JobFlags flags, TakeJobFlags(argc, argv));
  const bool launched = IsLaunchedRank();
  if (!launched && flags.world.value_or(1) > 1) {
    TESSERA_RETURN_IF_ERROR(Launch(whole_argv, flags));
  }
  // Ranks of one launcher share its stdout: whole lines, as they are written,
  // also if a rank is ended.
  if (launched) setvbuf(stdout, nullptr, _IOLBF, 0);
  SetHangDumpFolder(options.dump_folder);
  options.startup_timeout =
      flags.startup_timeout.value_or(options.startup_timeout);
  options.numa_binding = flags.numa_binding.value_or(options.numa_binding);
  TESSERA_ASSIGN_OR_RETURN(const Job job,
                           FindJob(flags, SourcesOfThisProcess(launched)));
  if (job.launcher == "nobody" && !flags.world.has_value()) {
    const std::string misspelt = MisspeltJobFlag(*argc, argv);
    if (!misspelt.empty()) {
      TESSERA_LOG(WARNING) << misspelt
                           << " is no flag of Init's; this is a world of one";
    }
  }
  TESSERA_ASSIGN_OR_RETURN(std::string secret, FindJobSecret());
  SetJobSecret(std::move(secret));
  TESSERA_VLOG(comm, 1) << "rank " << job.rank << " of " << job.world_size
                        << ", started by " << job.launcher << ", meets at '"
                        << job.rendezvous << "'";
  // Before other threads are there, which may read the environment.
  if (BuiltWithNccl()) (void)SetDeterministicCublas();  // else Create says so
  if (options.backend == "auto" || options.backend == "nccl") {
    for (const std::string& set :
         SetNcclEnvironment(options.nccl_environment)) {
      if (job.rank == 0) TESSERA_LOG(INFO) << set << " is set, as configured";
    }
    (void)StartInHostOrder();  // each of its groups asks
  }
  TESSERA_ASSIGN_OR_RETURN(World * world, WorldBuilder::Build(job, options));
  WorldBuilder::SetPlanWorld(flags.plan_world.value_or(0), world);
  absl::MutexLock lock(&g_mutex);
  g_world = world;
  return world;
}

void Shutdown() {
  World* world = nullptr;
  {
    absl::MutexLock lock(&g_mutex);
    std::swap(world, g_world);
  }
  if (world == nullptr) return;
  WaitForRetiredServers(kRetiredGrace);
  CommThread::Get().Stop();
  CommThread::OfDevices().Stop();
  CloseOpenBackends();
  const Communicator& comm = *world->communicator();
  const absl::Status written = WriteCommLog(comm.Report(), comm.rank());
  if (!written.ok()) TESSERA_LOG(WARNING) << written.message();
  delete world;
}

}  // namespace tessera
