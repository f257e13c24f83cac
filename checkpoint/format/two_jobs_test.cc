// Two jobs that save to one folder, in random schedules: before each of their
// calls to the file system it is drawn who goes on, and in every other schedule
// one of them is killed at some call. At every instant the folder holds a
// whole checkpoint, one that some job has saved or is about to have saved; none
// comes back once another has taken its place; who is told that it has saved
// has. And a writer that replaces what a reader has begun to read.
#include <errno.h>
#include <fcntl.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/sample_checkpoint_test_util.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/faulty_files.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

constexpr char kPath[] = "/run/ckpt";
constexpr int kRanks = 2;
constexpr int kSaves = 3;  // of each job

// Draws whose turn it is.
class Turns {
 public:
  Turns(int jobs, unsigned seed) : random_(seed), going_(jobs, true) { Draw(); }

  // Waits for the turn of `job`.
  void Await(int job) {
    absl::MutexLock lock(&mutex_);
    const auto is_mine = [&] { return turn_ == job; };
    mutex_.Await(absl::Condition(&is_mine));
  }
  // Ends the turn after the call.
  void Pass() {
    absl::MutexLock lock(&mutex_);
    Draw();
  }
  // It makes no more calls.
  void End(int job) {
    absl::MutexLock lock(&mutex_);
    going_[static_cast<size_t>(job)] = false;
    Draw();
  }

 private:
  void Draw() {
    std::vector<int> left;
    for (size_t j = 0; j < going_.size(); ++j) {
      if (going_[j]) left.push_back(static_cast<int>(j));
    }
    turn_ = left.empty() ? -1 : left[random_() % left.size()];
  }

  absl::Mutex mutex_;
  std::mt19937 random_;
  std::vector<bool> going_;
  int turn_ = -1;
};

// What one job sees of a disk. Once it is killed its descriptors are closed,
// as the kernel does, and no call of its reaches the disk any more.
class JobFiles : public FaultyFiles {
 public:
  // `after` runs after each call, in the job's turn.
  JobFiles(int job, int64_t kill_at, Turns* turns, MemoryDisk* disk,
           std::function<void()> after)
      : FaultyFiles(disk),
        job_(job),
        kill_at_(kill_at),
        turns_(turns),
        after_(std::move(after)) {}

  bool killed() const { return killed_; }

  int Open(int folder, const std::string& name, int flags) override {
    return Opened(FaultyFiles::Open(folder, name, flags));
  }
  int Reopen(int fd, int flags) override {
    return Opened(FaultyFiles::Reopen(fd, flags));
  }
  // No call that waits for its turn.
  void Close(int fd) override {
    if (!killed_ && open_.erase(fd) > 0) FaultyFiles::Close(fd);
  }

 private:
  int Opened(int fd) {
    if (fd >= 0) open_.insert(fd);
    return fd;
  }
  int64_t Ask(const char* call) override {
    if (killed_) return -EIO;
    turns_->Await(job_);
    if (calls() != kill_at_) return FaultyFiles::Ask(call);
    for (int fd : open_) FaultyFiles::Close(fd);
    killed_ = true;
    after_();
    turns_->End(job_);
    return -EIO;
  }
  void After() override {
    after_();
    turns_->Pass();
  }

  const int job_;
  const int64_t kill_at_;
  Turns* const turns_;
  const std::function<void()> after_;
  std::set<int> open_;
  bool killed_ = false;
};

// History has the seeds of the checkpoints that were there, one after the
// other.
class History {
 public:
  History(MemoryDisk* disk, const std::vector<SampleCheckpoint>* samples)
      : disk_(disk), samples_(samples) {}

  // Runs in some job's turn. It compares each new manifest's checkpoint in
  // full.
  void Look() {
    absl::MutexLock lock(&mutex_);
    const auto folder = Folder::Open(kPath, disk_);
    const auto manifest = folder.ok() ? ReadManifest(*folder) : folder.status();
    if (!manifest.ok()) {
      if (!seen_.empty()) ADD_FAILURE() << manifest.status();
      return;
    }
    const int step = static_cast<int>(manifest->step());
    if (manifest->id() == id_) {
      // Its files are not swept while it is the checkpoint.
      for (int r = 0; r < kRanks; ++r) {
        EXPECT_THAT(folder->OpenFile(DataFileName(id_, r)).status(), IsOk());
      }
      return;
    }
    id_ = manifest->id();
    EXPECT_EQ(std::count(seen_.begin(), seen_.end(), step), 0)
        << "it was there before";
    seen_.push_back(step);
    TESSERA_EXPECT_OK(
        (*samples_)[static_cast<size_t>(step)].Compare(kPath, disk_, 1));
  }
  bool Has(int step) {
    absl::MutexLock lock(&mutex_);
    return std::count(seen_.begin(), seen_.end(), step) > 0;
  }

 private:
  MemoryDisk* const disk_;
  const std::vector<SampleCheckpoint>* const samples_;
  absl::Mutex mutex_;
  uint64_t id_ = 0;
  std::vector<int> seen_;
};

// Number i is of step i.
std::vector<SampleCheckpoint> Samples() {
  std::vector<SampleCheckpoint> samples;
  for (int i = 0; i < 2 * kSaves + 1; ++i) samples.emplace_back(i);
  return samples;
}

struct Totals {
  int saved = 0, refused = 0, killed = 0;
};

void RunSchedule(unsigned seed, const std::vector<SampleCheckpoint>& samples,
                 Totals* totals) {
  MemoryDisk disk;
  std::mt19937 random(seed);
  Turns turns(2, seed);
  History history(&disk, &samples);
  const int victim = seed % 2 == 0 ? -1 : static_cast<int>(random() % 2);
  const auto kill_at = static_cast<int64_t>(random() % 90);
  std::vector<std::unique_ptr<JobFiles>> files;
  for (int job : {0, 1}) {
    files.push_back(
        std::make_unique<JobFiles>(job, job == victim ? kill_at : -1, &turns,
                                   &disk, [&] { history.Look(); }));
  }
  absl::Mutex mutex;
  std::vector<std::thread> jobs;
  for (int job : {0, 1}) {
    jobs.emplace_back([&, job] {
      JobFiles& own = *files[static_cast<size_t>(job)];
      for (int i = 0; i < kSaves && !own.killed(); ++i) {
        const int step = job * kSaves + i;
        bool committed = false;
        const absl::Status status = samples[static_cast<size_t>(step)].Save(
            kPath, &own, kRanks, &committed);
        if (own.killed()) break;
        absl::MutexLock lock(&mutex);
        if (status.ok()) {
          ++totals->saved;
          EXPECT_TRUE(history.Has(step)) << "said to be saved: " << step;
        } else {
          ++totals->refused;
          EXPECT_TRUE(absl::IsUnavailable(status)) << status;
          EXPECT_FALSE(history.Has(step)) << "refused: " << step;
        }
      }
      totals->killed += own.killed() ? 1 : 0;
      if (!own.killed()) turns.End(job);
    });
  }
  for (std::thread& job : jobs) job.join();
  // Whoever comes next finds a folder that is free, and leaves it clean.
  bool committed = false;
  TESSERA_ASSERT_OK(samples.back().Save(kPath, &disk, kRanks, &committed));
  TESSERA_EXPECT_OK(samples.back().Compare(kPath, &disk, 1));
  EXPECT_EQ(disk.FilesIn(kPath).size(), kRanks + 2u);
}

TEST(TwoJobsTest, RandomSchedules) {
  const std::vector<SampleCheckpoint> samples = Samples();
  Totals totals;
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    RunSchedule(seed, samples, &totals);
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(totals.saved, 100);
  EXPECT_GT(totals.refused, 100);
  EXPECT_GT(totals.killed, 40);
}

// This is the reverse of AReaderBesideAWriter: a whole save takes place between
// any two calls of a reader.
TEST(TwoJobsTest, AWriterBetweenTheCallsOfAReader) {
  const std::vector<SampleCheckpoint> samples = Samples();
  int wholes = 0, told = 0;
  for (int64_t k = 0;; ++k) {
    MemoryDisk disk;
    bool committed = false;
    TESSERA_ASSERT_OK(samples[0].Save(kPath, &disk, kRanks, &committed));
    const int64_t first = disk.calls();
    bool done = false;
    disk.before = [&](int64_t call, const char*) {
      if (done || call < first + k) return int64_t{0};
      done = true;
      TESSERA_EXPECT_OK(samples[1].Save(kPath, &disk, kRanks, &committed));
      return int64_t{0};
    };
    const absl::Status old = samples[0].Compare(kPath, &disk, 2);
    if (!done) break;
    const absl::Status now = samples[1].Compare(kPath, &disk, 2);
    TESSERA_EXPECT_OK(now);
    // NotFound means that it has found the new one.
    EXPECT_TRUE(old.ok() || absl::IsAborted(old) || absl::IsNotFound(old))
        << old;
    ++(old.ok() ? wholes : told);
  }
  EXPECT_GT(wholes, 0);
  EXPECT_GT(told, 5);
}

// A reader that takes minutes, such as an export, has its files open by then.
TEST(TwoJobsTest, AWriterBetweenTheCallsOfAReaderThatStays) {
  const std::vector<SampleCheckpoint> samples = Samples();
  int olds = 0, news = 0;
  for (int64_t k = 0;; ++k) {
    MemoryDisk disk;
    bool committed = false;
    TESSERA_ASSERT_OK(samples[0].Save(kPath, &disk, kRanks, &committed));
    const int64_t first = disk.calls();
    bool done = false;
    disk.before = [&](int64_t call, const char*) {
      if (done || call < first + k) return int64_t{0};
      done = true;
      TESSERA_EXPECT_OK(samples[1].Save(kPath, &disk, kRanks, &committed));
      return int64_t{0};
    };
    absl::StatusOr<CheckpointReader> reader =
        CheckpointReader::OpenToStay(kPath, &disk);
    TESSERA_ASSERT_OK(reader.status());
    TESSERA_EXPECT_OK(reader->Verify(2));
    ++(reader->manifest().step() == 0 ? olds : news);
    if (!done) break;
  }
  EXPECT_GT(olds, 5);
  EXPECT_GT(news, 5);
}

// One that saves all the time is an error in the end.
TEST(TwoJobsTest, AReaderBesideAWriterThatIsAlwaysFasterGivesUp) {
  const std::vector<SampleCheckpoint> samples = Samples();
  MemoryDisk disk;
  bool committed = false, saving = false;
  TESSERA_ASSERT_OK(samples[0].Save(kPath, &disk, kRanks, &committed));
  disk.before = [&](int64_t, const char* call) {
    if (saving || std::string(call) != "read") return int64_t{0};
    saving = true;
    TESSERA_EXPECT_OK(samples[1].Save(kPath, &disk, kRanks, &committed));
    saving = false;
    return int64_t{0};
  };
  const absl::Status status =
      CheckpointReader::OpenToStay(kPath, &disk).status();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
}

}  // namespace
}  // namespace tessera
