// Why beside the collectives: a rank that fails on its own cannot come to the
// collective in which the others wait, and they would wait for their timeout
// and then know nothing of the cause. Why a store: it takes no part in any
// collective, so it answers whatever the ranks are blocked in.
//
// Why an announcement can be taken back: most failures are told in an orderly
// way by the next agreement of all ranks (Communicator::AgreeOk); after that it
// must not end waits any more. Why it is kept as "past", with its count: ranks
// that announce all at once (AllPosted) must see that each other one did, also
// if that one saw all and took its own back first.
#include "comm/watch/announcements.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/thread/deadline.h"
#include "base/torch_guard.h"
#include "comm/rendezvous/start_watch.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(1);

std::string PostedKey(int rank) { return absl::StrCat("posted/", rank); }
std::string WaitingKey(int rank) { return absl::StrCat("waiting/", rank); }
std::string NoteKey(const std::string& board, int rank) {
  return absl::StrCat("note/", board, "/", rank);
}

std::optional<Announcement> ParseAnnouncement(int rank,
                                              const std::string& text) {
  const std::vector<absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(' ', 2));
  Announcement result;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &result.count)) {
    return std::nullopt;
  }
  result.rank = rank;
  result.standing = parts[1] != "past";
  result.final = parts[1] == "final";
  result.status = StatusFromText(parts[2]);
  return result;
}

std::optional<WaitingIn> ParseWaiting(const std::string& text) {
  const std::vector<absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(' ', 4));
  WaitingIn result;
  if (parts.size() != 5 || !absl::SimpleAtoi(parts[0], &result.beat) ||
      !absl::SimpleAtoi(parts[1], &result.sequence) ||
      !absl::SimpleAtoi(parts[2], &result.signature)) {
    return std::nullopt;
  }
  result.finished = parts[3] == "out";
  const std::vector<std::string> rest = absl::StrSplit(parts[4], '\x1f');
  if (rest.size() < 3) return std::nullopt;
  result.what = rest[0];
  result.details = rest[1];
  result.group = rest[2];
  for (size_t i = 3; i < rest.size(); ++i) {
    const std::pair<std::string, std::string> last =
        absl::StrSplit(rest[i], absl::MaxSplits(' ', 1));
    if (!absl::SimpleAtoi(last.first, &result.begun[last.second])) {
      return std::nullopt;
    }
  }
  return result;
}

std::string TextOf(const WaitingIn& waiting, int64_t beat) {
  std::string text =
      absl::StrCat(beat, " ", waiting.sequence, " ", waiting.signature,
                   waiting.finished ? " out " : " in ");
  absl::StrAppend(&text, waiting.what, "\x1f", waiting.details, "\x1f",
                  waiting.group);
  for (const auto& [group, sequence] : waiting.begun) {
    absl::StrAppend(&text, "\x1f", sequence, " ", group);
  }
  return text;
}

}  // namespace

std::string WaitingIn::Name() const {
  return absl::StrCat(what, " #", sequence, details.empty() ? "" : " (",
                      details, details.empty() ? "" : ")");
}

bool WaitingIn::HasBegun(const WaitingIn& other) const {
  if (group == other.group && sequence >= other.sequence) return true;
  const auto last = begun.find(other.group);
  return last != begun.end() && last->second >= other.sequence;
}

bool IsOwnError(const absl::Status& status) {
  return !absl::IsUnavailable(status) && !absl::IsCancelled(status) &&
         !absl::IsDeadlineExceeded(status);
}

Announcements::Announcements(c10::intrusive_ptr<c10d::Store> store, int rank,
                             int world_size, Clock clock)
    : clock_(std::move(clock)),
      store_(std::move(store), kPatience),
      rank_(rank),
      world_size_(world_size) {}

absl::StatusOr<std::unique_ptr<Announcements>> Announcements::Create(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
    bool same_host, Clock clock) {
  // With a client of its own: it may block in the store.
  TESSERA_ASSIGN_OR_RETURN(const c10::intrusive_ptr<c10d::Store> own_client,
                           CatchTorch("store", [&] { return store->clone(); }));
  std::unique_ptr<LivenessMonitor> liveness =
      LivenessMonitor::Create(*own_client, rank, world_size, same_host, clock);
  auto result = std::unique_ptr<Announcements>(
      new Announcements(std::move(store), rank, world_size, std::move(clock)));
  result->liveness_ = std::move(liveness);
  // So that something is known of a rank that is never heard of again.
  WaitingIn start;
  start.what = "start-up";
  start.details = "before its first collective";
  start.finished = true;
  // Nobody waits for what this rank posts yet: a busy host may take its time.
  TESSERA_RETURN_IF_ERROR(CatchTorch(kStoreError, [&] {
    own_client->set(PostedKey(rank), std::string());
    own_client->set(WaitingKey(rank), TextOf(start, /*beat=*/0));
  }));
  return result;
}

absl::Status Announcements::FailedHere(const absl::Status& status) const {
  return absl::UnavailableError(
      absl::StrCat("rank ", rank_, " failed: ", status.message()));
}

void Announcements::Post(const absl::Status& status, bool final) {
  absl::MutexLock lock(&mutex_);
  if (final_) return;
  final_ = final;
  posted_ = status;
  // Before this rank's own one is out: who sees that may take back his, and
  // then AllPosted could not tell it from an old one.
  before_ = ReadAll();
  store_.Set(PostedKey(rank_),
             absl::StrCat(++count_, final ? " final " : " now ",
                          StatusToText(status)));
}

void Announcements::PostFailure(const absl::Status& status) {
  Post(IsOwnError(status) ? FailedHere(status) : status, /*final=*/true);
}

void Announcements::Retract() {
  absl::MutexLock lock(&mutex_);
  if (!final_ && !posted_.ok()) {
    posted_ = absl::OkStatus();
    store_.Set(PostedKey(rank_), absl::StrCat(count_, " past "));
  }
}

absl::Status Announcements::posted() const {
  absl::MutexLock lock(&mutex_);
  return posted_;
}

std::vector<Announcement> Announcements::ReadAll() {
  std::vector<Announcement> all(world_size_);
  std::vector<std::string> keys;
  for (int r = 0; r < world_size_; ++r) keys.push_back(PostedKey(r));
  const std::optional<std::vector<std::string>> texts = store_.Get(keys);
  if (!texts.has_value()) return all;
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    all[r] = ParseAnnouncement(r, (*texts)[r]).value_or(Announcement());
  }
  return all;
}

std::vector<Announcement> Announcements::Read() {
  std::vector<Announcement> standing;
  for (Announcement& posted : ReadAll()) {
    if (posted.standing) standing.push_back(std::move(posted));
  }
  return standing;
}

bool Announcements::AllPosted(absl::Duration timeout,
                              const std::vector<int>& ranks) {
  const Deadline deadline = Deadline::After(timeout);
  std::vector<Announcement> before;
  {
    absl::MutexLock lock(&mutex_);
    if (count_ == 0) return false;
    before = before_;
  }
  auto has_posted = [&](const Announcement& now, int r) {
    const bool asked = ranks.empty() ||
                       std::find(ranks.begin(), ranks.end(), r) != ranks.end();
    return r == rank_ || !asked || now.standing || before[r].standing ||
           now.count > before[r].count;
  };
  while (true) {
    const std::vector<Announcement> all = ReadAll();
    int posted = 0;
    for (int r = 0; r < world_size_; ++r) posted += has_posted(all[r], r);
    if (posted == world_size_) return true;
    const std::vector<EndedRank> ended = liveness_->Ended();
    if (deadline.HasPassed() ||
        std::any_of(ended.begin(), ended.end(), [&](const EndedRank& e) {
          return !has_posted(all[e.rank], e.rank);
        })) {
      return false;
    }
    absl::SleepFor(absl::Milliseconds(10));
  }
}

bool Announcements::SetWaiting(const WaitingIn& waiting) {
  return store_.Set(WaitingKey(rank_), TextOf(waiting, ++beat_));
}

bool Announcements::WriteNote(const std::string& board,
                              const std::string& text) {
  return store_.Set(NoteKey(board, rank_), text);
}

std::optional<std::vector<std::string>> Announcements::ReadNotes(
    const std::string& board, const std::vector<int>& ranks) {
  std::vector<std::string> keys;
  keys.reserve(ranks.size());
  for (int r : ranks) keys.push_back(NoteKey(board, r));
  return store_.Get(keys);
}

std::optional<AnnouncementSnapshot> Announcements::ReadSnapshot() {
  // Waits first: a rank announces before it goes to another collective for
  // that reason, so who sees it there sees its announcement too.
  std::vector<std::string> keys;
  for (int r = 0; r < world_size_; ++r) keys.push_back(WaitingKey(r));
  for (int r = 0; r < world_size_; ++r) keys.push_back(PostedKey(r));
  const std::optional<std::vector<std::string>> texts = store_.Get(keys);
  if (!texts.has_value()) return std::nullopt;
  AnnouncementSnapshot snapshot;
  snapshot.waiting.resize(world_size_);
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    snapshot.waiting[r] = ParseWaiting((*texts)[r]);
    std::optional<Announcement> posted =
        ParseAnnouncement(r, (*texts)[world_size_ + r]);
    if (posted.has_value() && posted->standing) {
      snapshot.posted.push_back(*std::move(posted));
    }
  }
  return snapshot;
}

}  // namespace tessera
