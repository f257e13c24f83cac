#include "comm/shm/channels.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace tessera::shm {
namespace {

thread_local bool on_message_thread = false;

constexpr absl::Duration kLook = absl::Milliseconds(100);

absl::Duration Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::DurationFromTimespec(now);
}

// Records lie at multiples of this; the ring's length is one.
constexpr int64_t kRecordAlign = 16;
int64_t Aligned(int64_t bytes) {
  return (bytes + kRecordAlign - 1) / kRecordAlign * kRecordAlign;
}

void CopyIn(Pipe* pipe, uint64_t at, const void* from, int64_t bytes) {
  if (bytes == 0) return;
  const int64_t begin = static_cast<int64_t>(at % kPipeBytes);
  const int64_t first = std::min(bytes, kPipeBytes - begin);
  std::memcpy(pipe->ring + begin, from, first);
  std::memcpy(pipe->ring, static_cast<const char*>(from) + first,
              bytes - first);
}

void CopyOut(const Pipe& pipe, uint64_t at, void* to, int64_t bytes) {
  if (bytes == 0) return;
  const int64_t begin = static_cast<int64_t>(at % kPipeBytes);
  const int64_t first = std::min(bytes, kPipeBytes - begin);
  std::memcpy(to, pipe.ring + begin, first);
  std::memcpy(static_cast<char*>(to) + first, pipe.ring, bytes - first);
}

std::string Name(const char* what, int peer, int64_t tag) {
  return absl::StrCat(
      what,
      peer == Channels::kAnyPeer ? "any rank" : absl::StrCat("rank ", peer),
      ", tag ", tag);
}

}  // namespace

Channels::Channels(Team* team, int64_t heap_bytes, Options options)
    : team_(team),
      heap_bytes_(heap_bytes),
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
    out.record.kind = Kind::kLong;
    ready = Prepare(data, bytes, &send, &out.record.offset);
  } else {
    out.data = data;
  }
  Endings endings;
  {
    MutexLock lock(&mutex_);
    if (ready.ok()) ready = failed_;
    if (!ready.ok()) {
      endings.push_back([&] { done(ready, to); });
    } else {
      if (out.record.kind == Kind::kLong) {
        out.record.id = send.id = next_id_++;
        send.to = to;
        send.tag = tag;
        send.done = std::move(done);
        send.deadline = Now() + options_.timeout;
        long_sends_.push_back(std::move(send));
      } else {
        out.done = std::move(done);
        out.deadline = Now() + options_.timeout;
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
  const char* const heap = team_->heap_of(team_->rank());
  auto lies_in_heap = [&](const void* place) {
    *offset =
        reinterpret_cast<intptr_t>(place) - reinterpret_cast<intptr_t>(heap);
    return *offset >= 0 && *offset + bytes <= heap_bytes_;
  };
  if (lies_in_heap(data)) return absl::OkStatus();
  TESSERA_ASSIGN_OR_RETURN(send->copy,
                           AllocateCounted(std::max(bytes, kMappedFromBytes),
                                           MemoryKind::kCommunication));
  if (!lies_in_heap(send->copy.data())) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "send: no room for ", bytes, " bytes in the memory of all ranks"));
  }
  std::memcpy(send->copy.data(), data, bytes);
  return absl::OkStatus();
}

void Channels::Receive(int from, int64_t tag, void* data, int64_t bytes,
                       Done done) {
  Wanted wanted{
      from, tag, data, bytes, std::move(done), Now() + options_.timeout};
  Endings endings;
  {
    MutexLock lock(&mutex_);
    Progress(&endings);
    if (!failed_.ok()) {
      endings.push_back(
          [wanted, why = failed_] { wanted.done(why, wanted.from); });
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
        CountArrived(arrived, -1);
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
  if (waiting.empty()) return false;
  Pipe& pipe = PipeOf(team_->rank(), to);
  uint64_t written = pipe.written.value.load(std::memory_order_relaxed);
  const uint64_t begin = written;
  while (!waiting.empty()) {
    Outbound& next = waiting.front();
    const int64_t payload =
        next.record.kind == Kind::kInline ? next.record.bytes : 0;
    const int64_t needed =
        Aligned(static_cast<int64_t>(sizeof(Record))) + Aligned(payload);
    const auto used = static_cast<int64_t>(
        written - pipe.read.value.load(std::memory_order_seq_cst));
    if (used + needed > kPipeBytes) break;
    CopyIn(&pipe, written, &next.record, sizeof(Record));
    CopyIn(&pipe, written + Aligned(sizeof(Record)), next.data, payload);
    written += needed;
    if (next.done) {
      endings->push_back(
          [done = std::move(next.done), to] { done(absl::OkStatus(), to); });
    }
    waiting.pop_front();
  }
  if (written == begin) return false;
  pipe.written.value.store(written, std::memory_order_seq_cst);
  team_->of(to).message_door.RingIfSleeping();
  return true;
}

bool Channels::ReadFrom(int from, Endings* endings) {
  Pipe& pipe = PipeOf(from, team_->rank());
  uint64_t read = pipe.read.value.load(std::memory_order_relaxed);
  const uint64_t begin = read;
  const uint64_t written = pipe.written.value.load(std::memory_order_seq_cst);
  while (read < written) {
    Arrived arrived;
    CopyOut(pipe, read, &arrived.record, sizeof(Record));
    read += Aligned(sizeof(Record));
    if (arrived.record.kind == Kind::kInline) {
      arrived.data.resize(arrived.record.bytes);
      CopyOut(pipe, read, arrived.data.data(), arrived.record.bytes);
      read += Aligned(arrived.record.bytes);
    }
    if (arrived.record.kind == Kind::kWasRead) {
      WasRead(from, arrived.record.id, endings);
    } else {
      Take(from, std::move(arrived), endings);
    }
  }
  if (read == begin) return false;
  pipe.read.value.store(read, std::memory_order_seq_cst);
  team_->of(from).message_door.RingIfSleeping();
  return true;
}

void Channels::Take(int from, Arrived arrived, Endings* endings) {
  const auto match =
      std::find_if(wanted_.begin(), wanted_.end(), [&](const Wanted& w) {
        return w.tag == arrived.record.tag &&
               (w.from == from || w.from == kAnyPeer);
      });
  if (match == wanted_.end()) {
    CountArrived(arrived, 1);
    arrived_[from].push_back(std::move(arrived));
    return;
  }
  Wanted wanted = std::move(*match);
  wanted_.erase(match);
  Deliver(from, arrived, std::move(wanted), endings);
}

void Channels::CountArrived(const Arrived& arrived, int sign) const {
  const auto bytes = static_cast<int64_t>(arrived.data.size());
  MemoryLedger& ledger = MemoryLedger::Global();
  if (sign > 0) {
    ledger.Add(MemoryKind::kCommunication, bytes);
  } else {
    ledger.Remove(MemoryKind::kCommunication, bytes);
  }
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
  } else if (record.kind == Kind::kInline) {
    if (record.bytes > 0) {
      std::memcpy(wanted.data, arrived.data.data(), record.bytes);
    }
  } else {
    std::memcpy(wanted.data, team_->heap_of(from) + record.offset,
                record.bytes);
    // What was read before that flag was up was the message.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (pipe.broken.value.load(std::memory_order_seq_cst) != 0) {
      status = absl::UnavailableError(absl::StrCat(
          Name("receive from ", from, record.tag), ": its sender gave it up"));
    }
  }
  if (record.kind == Kind::kLong) {
    Outbound answer;
    answer.record.kind = Kind::kWasRead;
    answer.record.id = record.id;
    outbound_[from].push_back(std::move(answer));
  }
  endings->push_back(
      [done = std::move(wanted.done), status, from] { done(status, from); });
}

void Channels::WasRead(int from, uint64_t id, Endings* endings) {
  const auto it = std::find_if(
      long_sends_.begin(), long_sends_.end(),
      [&](const LongSend& send) { return send.to == from && send.id == id; });
  if (it == long_sends_.end()) return;
  endings->push_back(
      [done = std::move(it->done), from] { done(absl::OkStatus(), from); });
  long_sends_.erase(it);
}

// ---- the end of hope

absl::Status Channels::Lost(int peer) const {
  const Pipe& pipe = PipeOf(peer, team_->rank());
  if (pipe.broken.value.load(std::memory_order_seq_cst) != 0) {
    return absl::UnavailableError(
        absl::StrCat("rank ", peer, " has given up its messages"));
  }
  return options_.gone ? options_.gone(peer) : absl::OkStatus();
}

void Channels::EndHopeless(Endings* endings) {
  const absl::Duration now = Now();
  auto too_late = [&](const char* what, int peer, int64_t tag)
                      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
                        FailAll(absl::DeadlineExceededError(absl::StrCat(
                                    Name(what, peer, tag),
                                    ": nothing has come of it "
                                    "within ",
                                    absl::FormatDuration(options_.timeout))),
                                endings);
                      };
  for (const Wanted& wanted : wanted_) {
    if (wanted.deadline > now) continue;
    return too_late("receive from ", wanted.from, wanted.tag);
  }
  for (const LongSend& send : long_sends_) {
    if (send.deadline > now) continue;
    return too_late("send to ", send.to, send.tag);
  }
  for (int r = 0; r < team_->size(); ++r) {
    for (const Outbound& out : outbound_[r]) {
      if (!out.done || out.deadline > now) continue;
      return too_late("send to ", r, out.record.tag);
    }
  }
  absl::Status lost;
  int num_lost = 0;
  for (int r = 0; r < team_->size(); ++r) {
    if (r == team_->rank()) continue;
    const absl::Status why = Lost(r);
    if (why.ok()) continue;
    ++num_lost;
    lost = why;
    ReadFrom(r, endings);  // what it left
    const bool waits =
        !outbound_[r].empty() ||
        std::any_of(long_sends_.begin(), long_sends_.end(),
                    [r](const LongSend& s) { return s.to == r; }) ||
        std::any_of(wanted_.begin(), wanted_.end(),
                    [r](const Wanted& w) { return w.from == r; });
    if (waits) return FailAll(why, endings);
  }
  const bool waits_for_any =
      std::any_of(wanted_.begin(), wanted_.end(),
                  [](const Wanted& w) { return w.from == kAnyPeer; });
  if (waits_for_any && num_lost > 0 && num_lost == team_->size() - 1) {
    FailAll(lost, endings);
  }
}

void Channels::FailAll(const absl::Status& why, Endings* endings) {
  if (failed_.ok()) failed_ = why;
  for (int r = 0; r < team_->size(); ++r) {
    PipeOf(team_->rank(), r).broken.value.store(1, std::memory_order_seq_cst);
    team_->of(r).message_door.RingIfSleeping();
    for (Outbound& out : outbound_[r]) {
      if (!out.done) continue;
      endings->push_back(
          [done = std::move(out.done), why, r] { done(why, r); });
    }
    outbound_[r].clear();
  }
  for (LongSend& send : long_sends_) {
    endings->push_back(
        [done = std::move(send.done), why, to = send.to] { done(why, to); });
  }
  long_sends_.clear();
  for (Wanted& wanted : wanted_) {
    endings->push_back([done = std::move(wanted.done), why,
                        from = wanted.from] { done(why, from); });
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

void Channels::Run() {
  on_message_thread = true;
  pthread_setname_np(pthread_self(), "tessera-message");
  Door& door = team_->mine().message_door;
  absl::Duration look_at = Now() + kLook;
  while (!stop_) {
    door.sleeping.store(1, std::memory_order_seq_cst);
    const uint32_t seen = door.bell.load(std::memory_order_seq_cst);
    Endings endings;
    bool idle;
    bool moved;
    {
      MutexLock lock(&mutex_);
      moved = Progress(&endings);
      if (!Idle() && Now() >= look_at) {
        EndHopeless(&endings);
        look_at = Now() + kLook;
      }
      idle = Idle();
    }
    Call(endings);
    if (!moved && !stop_)
      door.Sleep(seen, idle ? absl::InfiniteDuration() : kLook);
  }
  door.sleeping.store(0);
}

}  // namespace tessera::shm
