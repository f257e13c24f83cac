#include "comm/watch/peer_progress.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tessera {
namespace {

// A beat comes every second; a rank whose stands still for longer is silent.
constexpr absl::Duration kSilence = absl::Seconds(3);
// How long rank 0 may take to answer.
constexpr absl::Duration kAnswerTime = absl::Milliseconds(200);
constexpr char kStopped[] = ": it is stopped, or cannot be reached";

std::string Rounded(absl::Duration d) {
  return absl::FormatDuration(absl::Trunc(
      d, d < absl::Seconds(10) ? absl::Milliseconds(100) : absl::Seconds(1)));
}

std::string Ranks(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ",
                      absl::StrJoin(ranks, ", "));
}

}  // namespace

void PeerProgress::Learn(const AnnouncementSnapshot& snapshot) {
  const absl::Duration now = announcements_->Now();
  for (size_t r = 0; r < snapshot.waiting.size(); ++r) {
    const std::optional<WaitingIn>& at = snapshot.waiting[r];
    Known& known = known_[r];
    if (!at.has_value()) continue;
    if (!known.last.has_value() || known.last->beat != at->beat) {
      known.since = now;
    }
    known.last = at;
  }
}

std::string PeerProgress::Silence(int rank) const {
  const absl::Duration silent = announcements_->Now() - known_[rank].since;
  if (silent < kSilence) return "";
  return absl::StrCat("last heard of ", Rounded(silent), " ago");
}

std::string PeerProgress::WhyAbsent(int rank, const WaitingIn& wait) const {
  const Known& known = known_[rank];
  const bool begun = known.last.has_value() && known.last->HasBegun(wait);
  if (begun && !HasEnded(rank)) return "";
  return absl::StrCat("rank ", rank, " has not come (", Of(rank), ")");
}

bool PeerProgress::HasEnded(int rank) const {
  for (const EndedRank& ended : announcements_->liveness().Ended()) {
    if (ended.rank == rank) return true;
  }
  return false;
}

std::string PeerProgress::Of(int rank) const {
  if (HasEnded(rank)) return "it has ended";
  const Known& known = known_[rank];
  if (!known.last.has_value()) return "nothing is known of it";
  const std::string name = known.last->Name();
  const std::string silence = Silence(rank);
  if (!silence.empty()) {
    return absl::StrCat(silence, ", ", known.last->finished ? "out of " : "in ",
                        name, kStopped);
  }
  return known.last->finished
             ? absl::StrCat("it finished ", name, " and is in its own code")
             : absl::StrCat("it is in ", name);
}

std::string PeerProgress::WhyElsewhere(int rank, const WaitingIn& wait) const {
  std::string absent = WhyAbsent(rank, wait);
  if (!absent.empty()) return absent;
  const WaitingIn& last = *known_[rank].last;
  if (last.signature != wait.signature) {
    return absl::StrCat("rank ", rank,
                        last.finished ? " has finished " : " is in ",
                        last.Name());
  }
  const std::string silence = Silence(rank);
  if (silence.empty()) return "";
  return absl::StrCat("rank ", rank, " has come, but was ", silence, kStopped);
}

// What is known of the others is old. The liveness monitor tells of rank 0,
// which often hosts the store, and the transport whose bytes are missing.
std::vector<std::string> PeerProgress::WithoutStore(
    const WaitingIn& wait, const std::vector<int>& ranks, int awaited) const {
  std::vector<std::string> parts;
  if (!announcements_->liveness().Rank0Answers(kAnswerTime)) {
    const bool member = std::find(ranks.begin(), ranks.end(), 0) != ranks.end();
    parts.push_back(member ? WhyAbsent(0, wait) : "");
    if (parts[0].empty()) parts[0] = "rank 0 does not answer";
  }
  if (awaited > 0 || (awaited == 0 && parts.empty())) {
    parts.push_back(absl::StrCat("bytes of rank ", awaited, " are missing"));
  }
  parts.push_back(
      "the store does not answer, so where the other ranks are is not known");
  return parts;
}

std::string PeerProgress::Describe(const WaitingIn& wait,
                                   const std::vector<int>& ranks, int awaited,
                                   absl::Duration waited) const {
  const int own = announcements_->rank();
  std::vector<int> here = {own};
  std::vector<std::string> parts;
  if (announcements_->store_silent()) {
    parts = WithoutStore(wait, ranks, awaited);
  } else {
    for (int r : ranks) {
      if (r == own) continue;
      std::string elsewhere = WhyElsewhere(r, wait);
      if (elsewhere.empty()) {
        here.push_back(r);
      } else {
        parts.push_back(std::move(elsewhere));
      }
    }
    if (parts.empty() && awaited >= 0) {
      parts.push_back(absl::StrCat("rank ", own, " waits for rank ", awaited));
    }
  }
  std::sort(here.begin(), here.end());
  parts.push_back(absl::StrCat(Ranks(here), here.size() == 1 ? " has" : " have",
                               " waited in it for ", Rounded(waited)));
  return absl::StrJoin(parts, "; ");
}

}  // namespace tessera
