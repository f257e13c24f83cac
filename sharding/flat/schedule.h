// Schedule: decides which flat parameters are whole, of those that can be
// freed: they are gathered ahead of their use and freed right after their last
// one.
//
// Every flat's use is recorded (sharding/flat/touch_history.h); the record says
// what comes next. When the use moves from one flat to another,
//   - flats expected within the next `prefetch` elements are wanted, too, while
//     all wanted ones fit within max_live;
//   - the one before is freed, unless it is wanted or fewer than
//     max_reuse_distance elements are used until it is used again;
//   - wanted ones are gathered, the one in use first; others are freed for
//     them, the longest unused first, where max_live asks for it.
// Where the record does not know (a first step, a path never taken), nothing is
// gathered ahead, and flats are kept only while all that are whole stay within
// both limits. A pinned flat is never freed.
//
// Ranks that run the same operators gather and free the same, since everything
// depends on the order of uses alone.
//
// Sources: DeepSpeed's stage3_prefetch_bucket_size, stage3_max_live_parameters,
// stage3_max_reuse_distance; FSDP2's reshard_after_forward and
// set_modules_to_{forward,backward}_prefetch.
//
// Threads: any.
#ifndef SHARDING_FLAT_SCHEDULE_H_
#define SHARDING_FLAT_SCHEDULE_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "sharding/flat/touch_history.h"

namespace tessera {

// Gatherable: what a schedule gathers and frees: a flat parameter whose working
// copy can be freed. Threads: any.
class Gatherable {
 public:
  virtual int64_t whole_numel() const = 0;
  // Whether it is whole, or being gathered.
  virtual bool whole() const = 0;
  // Starts the gather, which the next pin waits for; does nothing if it is
  // whole. `ahead`: before it is asked for. ASYNC. The pin returns an error.
  virtual void StartGather(bool ahead) = 0;
  // Frees it; false if it is pinned. LOCAL.
  virtual bool TryFree() = 0;
  // Frees it now, or when the last pin is released.
  virtual void FreeWhenUnpinned() = 0;
  // Forgets what a forward left for its backward besides the shard. LOCAL.
  virtual void DropSecondary() = 0;

 protected:
  ~Gatherable() = default;
};

// Limits of a schedule, in elements, over all flats of one engine.
struct ScheduleOptions {
  bool overlap = true;  // false: gathers wait at once, nothing is prefetched
  int64_t prefetch = 50'000'000;
  // 0: a flat is freed as soon as no operator uses it, and nothing is recorded
  // (slow; shows reads of what was freed).
  int64_t max_live = 1'000'000'000;
  int64_t max_reuse_distance = 1'000'000'000;
  // false: what the forward gathered stays whole for the backward.
  bool reshard_after_forward = true;
};

enum class Phase { kForward, kBackward };

class Schedule {
 public:
  explicit Schedule(ScheduleOptions options) : options_(options) {}

  // Sets the flats that can be freed, in order. Call it before the first use.
  void Start(std::vector<Gatherable*> flats);

  // Records that `flat` is about to be pinned; in a backward, if the thread
  // runs one.
  void Touch(Gatherable* flat);
  // Records a touch in the given phase, for callers that replay earlier
  // touches.
  void Touch(Gatherable* flat, Phase phase);
  // Forgets `flat`, which will not be used again and may be destroyed.
  void Forget(Gatherable* flat);
  // Ends a backward or a step: frees every flat that is not pinned.
  void EndPass();

  // Makes `next` wanted, in that order, when `flat` is touched in `phase`,
  // instead of what the record says; nothing is wanted if it is empty.
  void SetPrefetch(Gatherable* flat, Phase phase,
                   std::vector<Gatherable*> next);
  // Overrides ScheduleOptions::reshard_after_forward for one flat.
  void SetReshardAfterForward(Gatherable* flat, bool reshard);

  int64_t max_live() const { return options_.max_live; }
  bool free_after_use() const { return options_.max_live == 0; }
  // Counts the elements that are whole or being gathered; those who gather them
  // update it.
  std::atomic<int64_t>* live_counter() { return &live_; }
  int64_t live() const { return live_; }

 private:
  struct Entry {
    int index = 0;
    bool reshard_after_forward = true;
    // It stays whole until it is used or a border comes, whatever the record
    // says: for its backward, or because a list asked for it.
    bool stays = false;
    // By phase; null: as recorded.
    std::unique_ptr<std::vector<Gatherable*>> prefetch[2];
  };

  // A flat and, as the lowest bit, the phase in which it is used.
  using Mark = uintptr_t;
  static constexpr Mark kNone = 0;
  static Mark MarkOf(Gatherable* flat, Phase phase);
  static Gatherable* FlatOf(Mark mark);

  void Free(Gatherable* flat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Keeps(Gatherable* flat, Gatherable* current)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<Gatherable*> Wanted(Gatherable* current, Phase phase)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MakeRoom(Gatherable* flat, const std::vector<Gatherable*>& wanted)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MarkTouched(Gatherable* flat) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ScheduleOptions options_;
  std::atomic<int64_t> live_{0};
  std::atomic<Mark> newest_{kNone};
  absl::Mutex mutex_;  // before any flat's own
  std::vector<Gatherable*> flats_ ABSL_GUARDED_BY(mutex_);  // null: forgotten
  absl::flat_hash_map<Gatherable*, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<TouchHistory> history_ ABSL_GUARDED_BY(mutex_);
  // Flats that are whole or being gathered, least recently used first.
  std::vector<Gatherable*> whole_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // SHARDING_FLAT_SCHEDULE_H_
