#include "comm/announcements.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/torch_guard.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace tessera {
namespace {

std::string SaidKey(int rank) { return absl::StrCat("said/", rank); }
std::string WaitingKey(int rank) { return absl::StrCat("waiting/", rank); }

std::optional<Announcement> ParseAnnouncement(int rank,
                                              const std::string& text) {
  const std::vector<absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(' ', 3));
  Announcement result;
  int code = 0;
  if (parts.size() != 4 || !absl::SimpleAtoi(parts[0], &result.count) ||
      !absl::SimpleAtoi(parts[2], &code)) {
    return std::nullopt;
  }
  result.rank = rank;
  result.standing = parts[1] != "past";
  result.final = parts[1] == "final";
  result.status = absl::Status(static_cast<absl::StatusCode>(code), parts[3]);
  return result;
}

std::optional<WaitingIn> ParseWaiting(const std::string& text) {
  const std::vector<absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits(' ', 2));
  WaitingIn result;
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &result.sequence) ||
      !absl::SimpleAtoi(parts[1], &result.signature)) {
    return std::nullopt;
  }
  result.what = std::string(parts[2]);
  return result;
}

}  // namespace

Announcements::Announcements(c10::intrusive_ptr<c10d::Store> store, int rank,
                             int world_size)
    : store_(std::move(store)), rank_(rank), world_size_(world_size) {}

absl::StatusOr<std::unique_ptr<Announcements>> Announcements::Create(
    c10::intrusive_ptr<c10d::Store> store, int rank, int world_size) {
  auto result = std::unique_ptr<Announcements>(
      new Announcements(std::move(store), rank, world_size));
  if (!result->Write(SaidKey(rank), "") ||
      !result->Write(WaitingKey(rank), "")) {
    return absl::UnavailableError("the store of the rendezvous is gone");
  }
  return result;
}

bool Announcements::Write(const std::string& key, const std::string& value) {
  return CatchTorch("store",
                    [&] {
                      store_->set(key, value);
                      // set() does not wait for the store; a question behind it
                      // does.
                      store_->check({key});
                    })
      .ok();
}

std::string Announcements::Read(const std::string& key) {
  absl::StatusOr<std::string> value = CatchTorch(
      "store", [&]() -> std::string { return store_->get_to_str(key); });
  return value.ok() ? *std::move(value) : "";
}

absl::Status Announcements::FailedHere(const absl::Status& status) const {
  return absl::UnavailableError(
      absl::StrCat("rank ", rank_, " failed: ", status.message()));
}

void Announcements::Say(const absl::Status& status, bool final) {
  absl::MutexLock lock(&mutex_);
  if (final_) return;
  final_ = final;
  speaking_ = true;
  // Before the own words are out: whoever sees them may take his own back.
  before_ = ReadAll();
  Write(SaidKey(rank_),
        absl::StrCat(++count_, final ? " final " : " now ",
                     static_cast<int>(status.code()), " ", status.message()));
}

void Announcements::TakeBack() {
  absl::MutexLock lock(&mutex_);
  if (!final_ && speaking_) {
    speaking_ = false;
    Write(SaidKey(rank_), absl::StrCat(count_, " past 0 "));
  }
}

bool Announcements::speaking() const {
  absl::MutexLock lock(&mutex_);
  return speaking_;
}

std::vector<Announcement> Announcements::ReadAll() {
  std::vector<Announcement> all(world_size_);
  for (int r = 0; r < world_size_; ++r) {
    if (r == rank_) continue;
    all[r] = ParseAnnouncement(r, Read(SaidKey(r))).value_or(Announcement());
  }
  return all;
}

std::vector<Announcement> Announcements::Read() {
  std::vector<Announcement> standing;
  for (Announcement& said : ReadAll()) {
    if (said.standing) standing.push_back(std::move(said));
  }
  return standing;
}

bool Announcements::AllSaid(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  std::vector<Announcement> before;
  {
    absl::MutexLock lock(&mutex_);
    if (count_ == 0) return false;
    before = before_;
  }
  auto has_said = [&](const Announcement& now, int r) {
    return r == rank_ || now.standing || before[r].standing ||
           now.count > before[r].count;
  };
  while (true) {
    const std::vector<Announcement> all = ReadAll();
    int said = 0;
    for (int r = 0; r < world_size_; ++r) said += has_said(all[r], r);
    if (said == world_size_) return true;
    if (absl::Now() >= deadline) return false;
    absl::SleepFor(absl::Milliseconds(10));
  }
}

void Announcements::SetWaiting(const WaitingIn& waiting) {
  Write(WaitingKey(rank_), absl::StrCat(waiting.sequence, " ",
                                        waiting.signature, " ", waiting.what));
}

std::vector<std::optional<WaitingIn>> Announcements::ReadWaiting() {
  std::vector<std::optional<WaitingIn>> result(world_size_);
  for (int r = 0; r < world_size_; ++r) {
    if (r != rank_) result[r] = ParseWaiting(Read(WaitingKey(r)));
  }
  return result;
}

}  // namespace tessera
