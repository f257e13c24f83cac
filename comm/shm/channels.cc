#include "comm/shm/channels.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/monotonic.h"
#include "base/status.h"

namespace tessera::shm {
namespace {

thread_local bool on_message_thread = false;

constexpr absl::Duration kLook = absl::Milliseconds(100);

std::string Name(const char* what, int peer, int64_t tag) {
  return absl::StrCat(
      what,
      peer == Channels::kAnyPeer ? "any rank" : absl::StrCat("rank ", peer),
      ", tag ", tag);
}

}  // namespace

Channels::Channels(Team* team, Options options)
    : team_(team),
      options_(std::move(options)),
      outbound_(team->size()),
      arrived_(team->size()) {}

Channels::~Channels() {
  Abort(absl::CancelledError("the group was closed"));
  std::thread thread;
  {
    MutexLock lock(&mutex_);
    thread = std::move(thread_);
  }
  stop_ = true;
  team_->mine().message_door.Ring();
  if (thread.joinable()) thread.join();
}

Pipe& Channels::PipeOf(int from, int to) const {
  return reinterpret_cast<Pipe*>(team_->head_of(from) + kPipesOffset)[to];
}

void Channels::AddEnding(Done done, const absl::Status& status, int peer,
                         Endings* endings) {
  endings->push_back(
      [done = std::move(done), status, peer] { done(status, peer); });
}

void Channels::Call(const Endings& endings) {
  for (const auto& ending : endings) ending();
}

// ---- calls

void Channels::Send(int to, int64_t tag, const void* data, int64_t bytes,
                    Done done) {
  Outbound out;
  out.record.tag = tag;
  out.record.bytes = bytes;
  absl::Status ready;
  LongSend send;
  if (bytes > kInlineBytes) {
    out.record.kind = Record::Kind::kLong;
    ready = Prepare(data, bytes, &send, &out.record.offset);
  } else {
    out.data = data;
  }
  Endings endings;
  {
    MutexLock lock(&mutex_);
    if (ready.ok()) ready = failed_;
    if (!ready.ok()) {
      AddEnding(std::move(done), ready, to, &endings);
    } else {
      if (out.record.kind == Record::Kind::kLong) {
        out.record.id = send.id = next_id_++;
        send.to = to;
        send.tag = tag;
        send.done = std::move(done);
        send.deadline = MonotonicNow() + options_.timeout;
        long_sends_.push_back(std::move(send));
      } else {
        out.done = std::move(done);
        out.deadline = MonotonicNow() + options_.timeout;
      }
      outbound_[to].push_back(std::move(out));
      Progress(&endings);
      StartThread();
    }
  }
  Call(endings);
}

absl::Status Channels::Prepare(const void* data, int64_t bytes, LongSend* send,
                               int64_t* offset) const {
  *offset = team_->OffsetInHeap(data, bytes);
  if (*offset >= 0) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(send->copy,
                           AllocateCounted(std::max(bytes, kMappedFromBytes),
                                           MemoryKind::kCommunication));
  *offset = team_->OffsetInHeap(send->copy.data(), bytes);
  if (*offset < 0) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "send: no room for ", bytes, " bytes in the memory of all ranks"));
  }
  std::memcpy(send->copy.data(), data, bytes);
  return absl::OkStatus();
}

void Channels::Receive(int from, int64_t tag, void* data, int64_t bytes,
                       Done done) {
  Wanted wanted{from,
                tag,
                data,
                bytes,
                std::move(done),
                MonotonicNow() + options_.timeout};
  Endings endings;
  {
    MutexLock lock(&mutex_);
    Progress(&endings);
    if (!failed_.ok()) {
      AddEnding(std::move(wanted.done), failed_, from, &endings);
    } else {
      bool found = false;
      for (int r = 0; r < team_->size() && !found; ++r) {
        if (from != kAnyPeer && from != r) continue;
        auto& there = arrived_[r];
        const auto match =
            std::find_if(there.begin(), there.end(),
                         [&](const Arrived& a) { return a.record.tag == tag; });
        if (match == there.end()) continue;
        found = true;
        const Arrived arrived = std::move(*match);
        there.erase(match);
        Deliver(r, arrived, std::move(wanted), &endings);
      }
      if (!found) wanted_.push_back(std::move(wanted));
      Progress(&endings);
      StartThread();
    }
  }
  Call(endings);
}

void Channels::Abort(const absl::Status& why) {
  Endings endings;
  {
    MutexLock lock(&mutex_);
    FailAll(why, &endings);
  }
  Call(endings);
}

// ---- moving

bool Channels::Progress(Endings* endings) {
  bool moved = false;
  for (int r = 0; r < team_->size(); ++r) {
    moved |= ReadFrom(r, endings);
    moved |= WriteTo(r, endings);
  }
  return moved;
}

bool Channels::WriteTo(int to, Endings* endings) {
  auto& waiting = outbound_[to];
  Pipe& pipe = PipeOf(team_->rank(), to);
  bool moved = false;
  while (!waiting.empty() &&
         pipe.Write(waiting.front().record, waiting.front().data)) {
    moved = true;
    if (waiting.front().done) {
      AddEnding(std::move(waiting.front().done), absl::OkStatus(), to, endings);
    }
    waiting.pop_front();
  }
  if (moved) team_->of(to).message_door.RingIfSleeping();
  return moved;
}

bool Channels::ReadFrom(int from, Endings* endings) {
  Pipe& pipe = PipeOf(from, team_->rank());
  bool moved = false;
  Arrived arrived;
  while (pipe.Read(&arrived.record)) {
    auto data = AllocateCounted(arrived.record.payload_bytes(),
                                MemoryKind::kCommunication);
    if (!data.ok()) {
      FailAll(data.status(), endings);
      return true;
    }
    arrived.data = *std::move(data);
    pipe.ReadPayload(arrived.record, arrived.data.data());
    moved = true;
    if (arrived.record.kind == Record::Kind::kWasRead) {
      WasRead(from, arrived.record.id, endings);
    } else {
      Take(from, std::move(arrived), endings);
    }
  }
  if (moved) team_->of(from).message_door.RingIfSleeping();
  return moved;
}

void Channels::Take(int from, Arrived arrived, Endings* endings) {
  const auto match =
      std::find_if(wanted_.begin(), wanted_.end(), [&](const Wanted& w) {
        return w.tag == arrived.record.tag &&
               (w.from == from || w.from == kAnyPeer);
      });
  if (match == wanted_.end()) {
    arrived_[from].push_back(std::move(arrived));
    return;
  }
  Wanted wanted = std::move(*match);
  wanted_.erase(match);
  Deliver(from, arrived, std::move(wanted), endings);
}

void Channels::Deliver(int from, const Arrived& arrived, Wanted wanted,
                       Endings* endings) {
  const Record& record = arrived.record;
  const Pipe& pipe = PipeOf(from, team_->rank());
  absl::Status status;
  if (record.bytes != wanted.bytes) {
    status = absl::InvalidArgumentError(absl::StrCat(
        Name("receive from ", from, record.tag), ": expected ", wanted.bytes,
        " bytes, rank ", from, " sends ", record.bytes));
  } else if (record.kind == Record::Kind::kInline) {
    if (record.bytes > 0) {
      std::memcpy(wanted.data, arrived.data.data(), record.bytes);
    }
  } else {
    std::memcpy(wanted.data, team_->heap_of(from) + record.offset,
                record.bytes);
    // What was read before that flag was up was the message.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (pipe.broken()) {
      status = absl::UnavailableError(absl::StrCat(
          Name("receive from ", from, record.tag), ": its sender gave it up"));
    }
  }
  if (record.kind == Record::Kind::kLong) {
    Outbound answer;
    answer.record.kind = Record::Kind::kWasRead;
    answer.record.id = record.id;
    outbound_[from].push_back(std::move(answer));
  }
  AddEnding(std::move(wanted.done), status, from, endings);
}

void Channels::WasRead(int from, uint64_t id, Endings* endings) {
  const auto it = std::find_if(
      long_sends_.begin(), long_sends_.end(),
      [&](const LongSend& send) { return send.to == from && send.id == id; });
  if (it == long_sends_.end()) return;
  AddEnding(std::move(it->done), absl::OkStatus(), from, endings);
  long_sends_.erase(it);
}

// ---- the end of hope

absl::Status Channels::Lost(int peer) const {
  if (PipeOf(peer, team_->rank()).broken()) {
    return absl::UnavailableError(
        absl::StrCat("rank ", peer, " has given up its messages"));
  }
  return options_.gone ? options_.gone(peer) : absl::OkStatus();
}

std::string Channels::Overdue() const {
  const absl::Duration now = MonotonicNow();
  for (const Wanted& wanted : wanted_) {
    if (wanted.deadline <= now) {
      return Name("receive from ", wanted.from, wanted.tag);
    }
  }
  for (const LongSend& send : long_sends_) {
    if (send.deadline <= now) return Name("send to ", send.to, send.tag);
  }
  for (int r = 0; r < team_->size(); ++r) {
    for (const Outbound& out : outbound_[r]) {
      if (out.done && out.deadline <= now) {
        return Name("send to ", r, out.record.tag);
      }
    }
  }
  return "";
}

bool Channels::WaitsFor(int peer) const {
  return (peer != kAnyPeer && !outbound_[peer].empty()) ||
         std::any_of(long_sends_.begin(), long_sends_.end(),
                     [peer](const LongSend& s) { return s.to == peer; }) ||
         std::any_of(wanted_.begin(), wanted_.end(),
                     [peer](const Wanted& w) { return w.from == peer; });
}

void Channels::EndHopeless(Endings* endings) {
  const std::string overdue = Overdue();
  if (!overdue.empty()) {
    return FailAll(absl::DeadlineExceededError(
                       absl::StrCat(overdue, ": nothing has come of it within ",
                                    absl::FormatDuration(options_.timeout))),
                   endings);
  }
  absl::Status lost;
  int num_others = team_->size() - 1;
  for (int r = 0; r < team_->size(); ++r) {
    if (r == team_->rank()) continue;
    const absl::Status why = Lost(r);
    if (why.ok()) continue;
    --num_others;
    lost = why;
    ReadFrom(r, endings);  // what it left
    if (WaitsFor(r)) return FailAll(why, endings);
  }
  if (num_others == 0 && !lost.ok() && WaitsFor(kAnyPeer)) {
    FailAll(lost, endings);
  }
}

void Channels::FailAll(const absl::Status& why, Endings* endings) {
  if (failed_.ok()) failed_ = why;
  for (int r = 0; r < team_->size(); ++r) {
    PipeOf(team_->rank(), r).Break();
    team_->of(r).message_door.RingIfSleeping();
    for (Outbound& out : outbound_[r]) {
      if (out.done) AddEnding(std::move(out.done), why, r, endings);
    }
    outbound_[r].clear();
  }
  for (LongSend& send : long_sends_) {
    AddEnding(std::move(send.done), why, send.to, endings);
  }
  long_sends_.clear();
  for (Wanted& wanted : wanted_) {
    AddEnding(std::move(wanted.done), why, wanted.from, endings);
  }
  wanted_.clear();
}

// ---- the thread

bool Channels::Idle() const {
  return long_sends_.empty() && wanted_.empty() &&
         std::all_of(outbound_.begin(), outbound_.end(),
                     [](const auto& waiting) { return waiting.empty(); });
}

void Channels::StartThread() {
  if (Idle()) return;
  if (!thread_.joinable()) {
    thread_ = std::thread([this] { Run(); });
  } else {
    team_->mine().message_door.RingIfSleeping();
  }
}

bool Channels::IsCurrent() { return on_message_thread; }

absl::Duration Channels::Step() {
  Endings endings;
  absl::Duration rest;
  {
    MutexLock lock(&mutex_);
    const bool moved = Progress(&endings);
    if (!Idle() && MonotonicNow() >= look_at_) {
      EndHopeless(&endings);
      look_at_ = MonotonicNow() + kLook;
    }
    rest = moved    ? absl::ZeroDuration()
           : Idle() ? absl::InfiniteDuration()
                    : kLook;
  }
  Call(endings);
  return rest;
}

void Channels::Run() {
  on_message_thread = true;
  pthread_setname_np(pthread_self(), "tessera-message");
  Door& door = team_->mine().message_door;
  while (!stop_) {
    if (Step() == absl::ZeroDuration()) continue;
    door.sleeping.store(1, std::memory_order_seq_cst);
    const uint32_t seen = door.bell.load(std::memory_order_seq_cst);
    const absl::Duration rest = Step();
    if (rest > absl::ZeroDuration() && !stop_) door.Sleep(seen, rest);
    door.sleeping.store(0, std::memory_order_seq_cst);
  }
}

}  // namespace tessera::shm
