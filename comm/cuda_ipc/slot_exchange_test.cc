// Ranks are pairs of threads here, a host and its stream, which come late at
// random; memory is the host's. The order of a rank's write and another's read
// of one slot is by marks alone, so that ThreadSanitizer sees one that is not
// awaited, and the bits show it mostly.
#include "comm/cuda_ipc/slot_exchange.h"

#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tessera {
namespace {

constexpr int64_t kSlotBytes = 96;
constexpr absl::Duration kPatience = absl::Seconds(20);

// One in four is late.
void MaybeLate(std::minstd_rand& random) {
  if (random() % 4 == 0) absl::SleepFor(absl::Microseconds(random() % 200));
}

class Stream {
 public:
  explicit Stream(int seed) : random_(seed), thread_([this] { Run(); }) {}
  // Ends when all is done.
  ~Stream() {
    Give(nullptr);
    thread_.join();
  }
  void Give(std::function<void()> task) {
    absl::MutexLock lock(&mutex_);
    tasks_.push_back(std::move(task));
  }

 private:
  void Run() {
    for (;;) {
      std::function<void()> task;
      {
        absl::MutexLock lock(&mutex_);
        const auto some = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
          return !tasks_.empty();
        };
        mutex_.Await(absl::Condition(&some));
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      if (task == nullptr) return;
      MaybeLate(random_);
      task();
    }
  }
  std::minstd_rand random_;
  absl::Mutex mutex_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

// What the ranks share.
struct Shared {
  explicit Shared(int ranks) : size(ranks), of(ranks) {}
  struct Rank {
    char slots[PeerMemory::kSlots][kSlotBytes] = {};
    struct {
      std::atomic<int64_t> recorded{0}, reached{0};
    } marks[PeerMemory::kMarks][PeerMemory::kSlots];
  };
  const int size;
  std::vector<Rank> of;
  std::atomic<bool> stuck{false};

  absl::Mutex mutex;
  int64_t arrived ABSL_GUARDED_BY(mutex) = 0;

  absl::Status Meet() {
    absl::MutexLock lock(&mutex);
    const int64_t all = (arrived++ / size + 1) * size;
    const auto there = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex) {
      return arrived >= all;
    };
    return mutex.AwaitWithTimeout(absl::Condition(&there), kPatience)
               ? absl::OkStatus()
               : absl::DeadlineExceededError("not all have come");
  }
};

class ModelMemory : public PeerMemory {
 public:
  ModelMemory(int rank, Shared* shared)
      : rank_(rank), shared_(shared), stream_(rank + 1) {}

  int rank() const override { return rank_; }
  int world_size() const override { return shared_->size; }
  int64_t slot_bytes() const override { return kSlotBytes; }

  absl::Status Record(Mark mark, int slot) override {
    auto& own = shared_->of[rank_].marks[static_cast<int>(mark)][slot];
    stream_.Give([&own, n = ++own.recorded] { own.reached = n; });
    return absl::OkStatus();
  }
  absl::Status Await(int rank, Mark mark, int slot) override {
    auto& theirs = shared_->of[rank].marks[static_cast<int>(mark)][slot];
    stream_.Give([this, &theirs, n = theirs.recorded.load()] {
      const absl::Time deadline = absl::Now() + kPatience;
      while (theirs.reached < n && !shared_->stuck) {
        if (absl::Now() > deadline) shared_->stuck = true;
        std::this_thread::yield();
      }
    });
    return absl::OkStatus();
  }
  absl::Status Put(const void* from, int slot, int64_t at,
                   int64_t bytes) override {
    return Give(shared_->of[rank_].slots[slot] + at, from, bytes,
                at + bytes <= kSlotBytes);
  }
  absl::Status Get(int rank, int slot, int64_t at, void* to,
                   int64_t bytes) override {
    return Give(to, shared_->of[rank].slots[slot] + at, bytes,
                at + bytes <= kSlotBytes);
  }
  absl::Status Copy(const void* from, void* to, int64_t bytes) override {
    return Give(to, from, bytes, /*fits=*/true);
  }

 private:
  absl::Status Give(void* to, const void* from, int64_t bytes, bool fits) {
    if (!fits) return absl::InternalError("past the end of a slot");
    stream_.Give([to, from, bytes] { std::memcpy(to, from, bytes); });
    return absl::OkStatus();
  }
  const int rank_;
  Shared* const shared_;
  Stream stream_;
};

// Byte i of what rank r gives to rank `to`, in a round.
char Byte(int r, int to, int round, int64_t i) {
  return static_cast<char>(r * 31 + to * 57 + round * 13 + i * 7 + (i >> 5));
}
std::string Bytes(int r, int to, int round, int64_t n) {
  std::string text(static_cast<size_t>(n), '\0');
  for (int64_t i = 0; i < n; ++i) text[i] = Byte(r, to, round, i);
  return text;
}

// `work` on the host of each rank; its error, or that streams were stuck.
absl::Status OnAllRanks(
    int size, const std::function<absl::Status(int, SlotExchange&)>& work) {
  Shared shared(size);
  std::vector<absl::Status> results(size);
  {
    std::vector<std::unique_ptr<ModelMemory>> memories;
    std::vector<std::thread> hosts;
    for (int r = 0; r < size; ++r) {
      memories.push_back(std::make_unique<ModelMemory>(r, &shared));
      hosts.emplace_back([&, r, memory = memories.back().get()] {
        std::minstd_rand random(100 + r);
        SlotExchange exchange(memory, [&] {
          MaybeLate(random);
          return shared.Meet();
        });
        results[r] = work(r, exchange);
      });
    }
    for (std::thread& host : hosts) host.join();
  }  // the streams are done
  for (const absl::Status& result : results) TESSERA_RETURN_IF_ERROR(result);
  if (shared.stuck) return absl::InternalError("streams wait for ever");
  return absl::OkStatus();
}

constexpr int64_t kSizes[] = {1, 31, 32, 33, 96, 97, 1000};
constexpr int kRounds = 20;

class SlotExchangeTest : public ::testing::TestWithParam<int> {};

// Buffers live until the streams are done: collectives only give work to them.
TEST_P(SlotExchangeTest, AllGathers) {
  const int size = GetParam();
  using Buffers = std::vector<std::string>;
  std::vector<Buffers> in(size), out(size);
  for (int r = 0; r < size; ++r) {
    for (int round = 0; round < kRounds; ++round) {
      const int64_t n = kSizes[round % std::size(kSizes)];
      in[r].push_back(Bytes(r, 0, round, n));
      out[r].emplace_back(static_cast<size_t>(size * n), '\0');
    }
  }
  TESSERA_ASSERT_OK(
      OnAllRanks(size, [&](int r, SlotExchange& exchange) -> absl::Status {
        for (int round = 0; round < kRounds; ++round) {
          const auto n = static_cast<int64_t>(in[r][round].size());
          const char* from = in[r][round].data();
          char* to = &out[r][round][0];
          if (round % 2 == 1) {  // in place
            std::memcpy(to + r * n, from, static_cast<size_t>(n));
            from = to + r * n;
          }
          TESSERA_RETURN_IF_ERROR(exchange.AllGather(from, n, to));
        }
        return absl::OkStatus();
      }));
  for (int round = 0; round < kRounds; ++round) {
    std::string want;
    for (int r = 0; r < size; ++r) want += in[r][round];
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(out[r][round] == want) << "rank " << r << ", " << round;
    }
  }
}

TEST_P(SlotExchangeTest, AllToAllsAndBroadcastsInTurns) {
  const int size = GetParam();
  using Lists = std::vector<std::vector<std::string>>;  // by round and rank
  std::vector<Lists> in(size), out(size);
  std::vector<std::vector<std::string>> data(size);
  for (int r = 0; r < size; ++r) {
    for (int round = 0; round < kRounds; ++round) {
      const int64_t n = kSizes[round % std::size(kSizes)];
      in[r].emplace_back();
      for (int to = 0; to < size; ++to) {
        in[r].back().push_back(Bytes(r, to, round, n));
      }
      out[r].emplace_back(size, std::string(static_cast<size_t>(n), '\0'));
      data[r].push_back(Bytes(r, 77, round, n));
    }
  }
  TESSERA_ASSERT_OK(
      OnAllRanks(size, [&](int r, SlotExchange& exchange) -> absl::Status {
        for (int round = 0; round < kRounds; ++round) {
          std::vector<const char*> from;
          std::vector<char*> to;
          for (std::string& text : in[r][round]) from.push_back(text.data());
          for (std::string& text : out[r][round]) to.push_back(&text[0]);
          const auto n = static_cast<int64_t>(data[r][round].size());
          TESSERA_RETURN_IF_ERROR(exchange.AllToAll(from, n, to));
          TESSERA_RETURN_IF_ERROR(
              exchange.Broadcast(&data[r][round][0], n, round % size));
        }
        return absl::OkStatus();
      }));
  for (int round = 0; round < kRounds; ++round) {
    const int64_t n = kSizes[round % std::size(kSizes)];
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(data[r][round] == Bytes(round % size, 77, round, n))
          << "broadcast, rank " << r << ", " << round;
      for (int from = 0; from < size; ++from) {
        EXPECT_TRUE(out[r][round][from] == Bytes(from, r, round, n))
            << "rank " << r << " of " << from << ", " << round;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(World, SlotExchangeTest, ::testing::Values(2, 3, 4));

// Nothing is read of a rank that has not come.
TEST(SlotExchangeErrorTest, AMeetingThatFailsEndsTheCollective) {
  Shared shared(2);
  std::string out(2 * kSlotBytes * 3, '-');
  const std::string in(kSlotBytes * 3, 'a');
  {
    ModelMemory memory(0, &shared);
    int meetings = 0;
    SlotExchange exchange(&memory, [&] {
      return ++meetings < 2 ? absl::OkStatus()
                            : absl::UnavailableError("rank 1 has ended");
    });
    EXPECT_THAT(exchange.AllGather(in.data(), kSlotBytes * 3, &out[0]),
                StatusIs(absl::StatusCode::kUnavailable));
    EXPECT_EQ(meetings, 2);
  }
  // The first chunk of rank 1's part, as its slot was; no more.
  EXPECT_EQ(out.substr(kSlotBytes * 3, kSlotBytes),
            std::string(kSlotBytes, '\0'));
  EXPECT_EQ(out.substr(kSlotBytes * 4), std::string(kSlotBytes * 2, '-'));
}

}  // namespace
}  // namespace tessera
