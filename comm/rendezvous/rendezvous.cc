// Why ranks meet at all before any transport connects: a transport that waits
// for a rank that will never come says nothing of which one, for minutes. Here
// each rank is counted and named, a job whose ranks disagree on its size is
// refused, and what each tells of its host decides which transport is taken.
//
// Why ranks meet on a thread that can be left to itself: a name service may not
// answer, libtorch's stores wait for ever for a host that is stopped, and a
// file that holds something else is read again and again.
#include "comm/rendezvous/rendezvous.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "base/env.h"
#include "base/status.h"
#include "base/system/system_limits.h"
#include "base/torch_guard.h"
#include "c10/util/Logging.h"
#include "comm/connect/job_secret.h"
#include "comm/rendezvous/abandonable.h"
#include "comm/rendezvous/local_address.h"
#include "comm/rendezvous/start_watch.h"
#include "comm/rendezvous/store_client.h"
#include "comm/rendezvous/store_file.h"
#include "comm/rendezvous/store_server.h"
#include "torch/csrc/distributed/c10d/FileStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace tessera {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

constexpr char kCame[] = "came";
constexpr char kWorldSize[] = "world_size";
// libtorch's levels.
constexpr int kLogError = 2;
constexpr int kLogFatal = 3;
constexpr absl::Duration kPoll = absl::Milliseconds(5);
constexpr absl::Duration kMaxPoll = absl::Milliseconds(100);
// After the deadline: for what was tried at the last moment.
constexpr absl::Duration kLastTry = absl::Milliseconds(100);
// After the deadline: to ask who is missing, and to tell the others.
constexpr absl::Duration kLastWords = absl::Seconds(1);

std::string InfoKey(int rank) { return absl::StrCat("info/", rank); }

absl::Status Describe(absl::StatusCode code, const RendezvousPlace& place,
                      absl::string_view message) {
  return absl::Status(
      code, absl::StrCat("rendezvous ", place.address, ": ", message));
}

// To a tenth: what was left of a round figure when this code came to it.
std::string Seconds(absl::Duration d) {
  const absl::Duration tenth = absl::Milliseconds(100);
  return absl::StrCat(absl::ToDoubleSeconds(absl::Floor(d + tenth / 2, tenth)),
                      " s");
}

// "rank 1 of 4 has", "ranks 1, 3 of 4 have"
std::string Missing(const std::vector<int>& ranks, int world_size) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ",
                      absl::StrJoin(ranks, ", "), " of ", world_size,
                      ranks.size() == 1 ? " has" : " have");
}

// The one that torchrun's agent hosts.
StorePtr OpenTcpStore(const RendezvousPlace& place, Deadline deadline) {
  c10d::TCPStoreOptions options;
  options.port = place.port;
  options.waitWorkers = false;
  options.timeout = absl::ToChronoMilliseconds(
      std::max(deadline.Left(), absl::Milliseconds(1)));
  return c10::make_intrusive<c10d::TCPStore>(place.host, options);
}

bool IsLoopbackName(const std::string& host) {
  return host == "localhost" || absl::StartsWith(host, "127.");
}

// The job's own, which this rank hosts if it is the one.
absl::StatusOr<StorePtr> OpenStore(const RendezvousPlace& place, int rank,
                                   int world_size, Deadline deadline) {
  if (place.is_tcp_store) {
    return CatchTorch("store", [&] { return OpenTcpStore(place, deadline); });
  }
  StoreClientOptions client;
  // The name may lead to another loopback address, where others may listen.
  client.host = IsLoopbackName(place.host) ? "127.0.0.1" : place.host;
  client.port = place.port;
  client.key = JobKey(kStorePurpose, place.key_prefix);
  client.rank = rank;
  if (IsStoreHost(place, rank)) {
    StoreServer::Options server;
    server.loopback = IsLoopbackName(place.host);
    server.port = place.port;
    server.world_size = world_size;
    server.key = client.key;
    TESSERA_ASSIGN_OR_RETURN(client.server, StoreServer::Start(server));
  }
  return ConnectStore(client, deadline);
}

class Meeter {
 public:
  Meeter(const RendezvousPlace& place, int rank, int world_size,
         std::function<std::string()> info, Deadline deadline)
      : place_(place),
        rank_(rank),
        world_size_(world_size),
        info_(std::move(info)),
        deadline_(deadline),
        allowed_(deadline.Left()) {}

  absl::StatusOr<Meeting> Run();
  // OK until the deadline has passed for good. May be called while Run runs.
  absl::Status GiveUp() const;

 private:
  absl::Status Open();
  absl::Status OpenError(const absl::Status& status) const;
  absl::Status Register();
  absl::Status WaitForAll();
  absl::Status TooLate();
  absl::StatusOr<std::vector<std::string>> Infos();
  bool Hosting() const { return IsStoreHost(place_, rank_); }

  const RendezvousPlace place_;
  const int rank_;
  const int world_size_;
  const std::function<std::string()> info_;
  const Deadline deadline_;
  const absl::Duration allowed_;
  std::atomic<const char*> phase_{"reaches the store"};
  StorePtr store_;
};

absl::StatusOr<Meeting> Meeter::Run() {
  Meeting meeting;
  TESSERA_RETURN_IF_ERROR(Open());
  absl::Status status = CatchTorch(kStoreError, [&]() -> absl::Status {
    phase_ = "registers";
    TESSERA_RETURN_IF_ERROR(Register());
    phase_ = "waits for the other ranks";
    TESSERA_RETURN_IF_ERROR(WaitForAll());
    phase_ = "reads what the other ranks tell";
    TESSERA_ASSIGN_OR_RETURN(meeting.infos, Infos());
    return absl::OkStatus();
  });
  if (status.ok()) {
    meeting.store = store_;
    return meeting;
  }
  if (Hosting()) PutFailure(*store_, status, /*hosts_store=*/true);
  return Describe(status.code(), place_, status.message());
}

absl::Status Meeter::GiveUp() const {
  if (!(deadline_ + kLastWords).HasPassed()) return absl::OkStatus();
  return Describe(absl::StatusCode::kDeadlineExceeded, place_,
                  absl::StrCat(SilentStore(place_), " within ",
                               Seconds(allowed_), ", while rank ", rank_,
                               " of ", world_size_, " ", phase_.load()));
}

absl::Status Meeter::Open() {
  if (!place_.path.empty()) {
    const absl::Status claimed = ClaimStoreFile(place_.path);
    if (!claimed.ok()) {
      return Describe(claimed.code(), place_, claimed.message());
    }
    return CatchTorch(absl::StrCat("rendezvous ", place_.address), [&] {
      store_ = c10::make_intrusive<c10d::PrefixStore>(
          place_.key_prefix,
          c10::make_intrusive<c10d::FileStore>(place_.path, world_size_));
    });
  }
  // Nobody may answer, the name service neither, so not on this thread.
  auto opened = std::make_shared<StorePtr>();
  auto work = [opened, place = place_, rank = rank_, world_size = world_size_,
               deadline = deadline_]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(*opened,
                             OpenStore(place, rank, world_size, deadline));
    return absl::OkStatus();
  };
  auto stop = [&]() -> absl::Status {
    if (!(deadline_ + kLastTry).HasPassed()) return absl::OkStatus();
    return absl::DeadlineExceededError("no answer");
  };
  absl::Status status = RunAbandonable(work, stop);
  if (!status.ok()) return OpenError(status);
  // Longer than GiveUp waits, which says more.
  (*opened)->setTimeout(absl::ToChronoMilliseconds(allowed_ + 2 * kLastWords));
  store_ = c10::make_intrusive<c10d::PrefixStore>(place_.key_prefix, *opened);
  return absl::OkStatus();
}

absl::Status Meeter::OpenError(const absl::Status& status) const {
  if (absl::IsResourceExhausted(status)) {
    return Describe(status.code(), place_, status.message());
  }
  const bool has_way = !AddressToward(place_.host).empty();
  if (!has_way && IsLoopbackName(place_.host)) {
    return Describe(absl::StatusCode::kUnavailable, place_,
                    NoLoopback("no route there"));
  }
  if (absl::IsNotFound(status) || !has_way) {
    return Describe(
        absl::StatusCode::kUnavailable, place_,
        absl::StrCat("this host does not know '", place_.host,
                     "', or has no route to it; give rank 0's host as "
                     "MASTER_ADDR or --rendezvous"));
  }
  if (absl::IsAlreadyExists(status)) {
    return Describe(absl::StatusCode::kUnavailable, place_,
                    absl::StrCat("port ", place_.port,
                                 " is in use (rank 0 cannot listen)"));
  }
  if (absl::IsPermissionDenied(status)) {
    return Describe(status.code(), place_,
                    absl::StrCat(status.message(), "; give all ranks the same ",
                                 kJobSecretVariable,
                                 " and job, and other jobs another "
                                 "port"));
  }
  if (Hosting() && !IsThisHost(place_.host)) {
    return Describe(
        absl::StatusCode::kUnavailable, place_,
        absl::StrCat("rank 0 listens where it runs, and '", place_.host,
                     "' does not lead to that host; give all ranks rank 0's "
                     "host as MASTER_ADDR or --rendezvous, or start rank 0 "
                     "there"));
  }
  if (Hosting()) {
    return Describe(absl::StatusCode::kUnavailable, place_,
                    absl::StrCat("rank 0 cannot listen: ", status.message()));
  }
  const std::string host =
      place_.hosted_by_launcher ? "the launcher" : "rank 0";
  if (!absl::IsDeadlineExceeded(status) && !absl::IsAborted(status)) {
    return Describe(
        absl::StatusCode::kUnavailable, place_,
        absl::StrCat("cannot reach ", host, ": ", status.message()));
  }
  return Describe(
      absl::StatusCode::kDeadlineExceeded, place_,
      absl::StrCat(host, " has not come within ", Seconds(allowed_),
                   absl::IsAborted(status)
                       ? " (the process that listens there rejects this rank: "
                         "it belongs to another user, is not a store of "
                         "Tessera, or is overrun by strangers)"
                       : " (no store answers there)"));
}

absl::Status Meeter::Register() {
  // Another's value, if one was there first.
  const std::string mine = absl::StrCat(world_size_);
  const std::string first = store_->compareSet(kWorldSize, "", mine);
  if (first != mine) {
    return absl::InvalidArgumentError(absl::StrCat("WORLD_SIZE is ", mine,
                                                   " at rank ", rank_, ", and ",
                                                   first, " at another rank"));
  }
  if (store_->add(CameKey(rank_), 1) != 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", rank_, " has come twice: two processes have the same RANK",
        place_.path.empty() ? "" : ", or the file is left from another job"));
  }
  store_->set(InfoKey(rank_), info_());
  store_->add(kCame, 1);
  return absl::OkStatus();
}

absl::Status Meeter::WaitForAll() {
  absl::Duration poll = kPoll;
  while (store_->add(kCame, 0) < world_size_) {
    TESSERA_RETURN_IF_ERROR(StartFailure(*store_));
    if (deadline_.HasPassed()) return TooLate();
    absl::SleepFor(poll);
    poll = std::min(poll * 2, kMaxPoll);
  }
  return absl::OkStatus();
}

// One that has come and not told of itself is missing too.
absl::Status Meeter::TooLate() {
  std::vector<int> missing;
  for (int r = 0; r < world_size_; ++r) {
    if (!store_->check({InfoKey(r)})) missing.push_back(r);
  }
  if (missing.empty()) return absl::OkStatus();  // the last one just has
  return absl::DeadlineExceededError(absl::StrCat(
      Missing(missing, world_size_), " not come within ", Seconds(allowed_)));
}

absl::StatusOr<std::vector<std::string>> Meeter::Infos() {
  std::vector<std::string> infos;
  for (int r = 0; r < world_size_; ++r) {
    infos.push_back(store_->get_to_str(InfoKey(r)));
  }
  return infos;
}

}  // namespace

std::string CameKey(int rank) { return absl::StrCat("came/", rank); }

absl::StatusOr<RendezvousPlace> ParseRendezvous(absl::string_view address) {
  RendezvousPlace place;
  place.address = std::string(address);
  place.key_prefix = kStorePrefix;
  absl::string_view rest = address;
  if (absl::ConsumePrefix(&rest, "file://") && absl::StartsWith(rest, "/")) {
    place.path = std::string(rest);
    return place;
  }
  rest = address;
  const size_t colon = rest.rfind(':');
  uint32_t port = 0;
  if (absl::ConsumePrefix(&rest, "tcp://") && colon > 6 &&
      absl::SimpleAtoi(address.substr(colon + 1), &port) && port > 0 &&
      port <= 65535) {
    absl::string_view host = address.substr(6, colon - 6);
    if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
    place.host = std::string(host);
    place.port = static_cast<uint16_t>(port);
    return place;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("rendezvous '", address,
                   "': expected env://, tcp://host:port or file:///path"));
}

absl::StatusOr<Meeting> Meet(const RendezvousPlace& place, int rank,
                             int world_size, std::function<std::string()> info,
                             Deadline deadline) {
  auto meeter = std::make_shared<Meeter>(place, rank, world_size,
                                         std::move(info), deadline);
  auto meeting = std::make_shared<Meeting>();
  auto work = [meeter, meeting]() -> absl::Status {
    TESSERA_ASSIGN_OR_RETURN(*meeting, meeter->Run());
    return absl::OkStatus();
  };
  const auto stop = [meeter] { return meeter->GiveUp(); };
  TESSERA_RETURN_IF_ERROR(RunAbandonable(work, stop));
  return *std::move(meeting);
}

bool IsStoreHost(const RendezvousPlace& place, int rank) {
  return rank == 0 && place.path.empty() && !place.hosted_by_launcher;
}

std::string SilentStore(const RendezvousPlace& place) {
  if (!place.path.empty()) {
    return "the file gives no answer (it is locked, or what is in it is not "
           "of this job or cut off: delete it, or give another path)";
  }
  return absl::StrCat(place.hosted_by_launcher ? "the launcher" : "rank 0",
                      ", which hosts the store, does not answer (it is "
                      "stopped, or cut off)");
}

// Libtorch logs every try of a connection, with a backtrace, and that would
// bury the one line that says what is wrong. While ranks meet only fatal
// messages are let through, unless the user has set a level.
void MuteTorch(bool mute) {
  static const bool told = EnvString("TORCH_CPP_LOG_LEVEL").has_value();
  if (!told) FLAGS_caffe2_log_level = mute ? kLogFatal : kLogError;
}

}  // namespace tessera
