// TraceLog: records what happens while a trace is taken, in order: bytes, and
// operators and parameters by number; it knows no tensors.
//
// Threads: any; events are in the order of the calls.
#ifndef SHARDING_TRACE_TRACE_LOG_H_
#define SHARDING_TRACE_TRACE_LOG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"

namespace tessera {

struct TraceEvent {
  enum class Kind : uint8_t {
    kAllocate,  // `what`: a number of its own, from 0
    kFree,      // `what`: that of its kAllocate
    kOperator,  // has run; `what`: its name. Its results are allocated before
    kTouch,     // an operator is about to use a parameter's values; `what`: it
    // An operator of the forward begins that was given parameter `what`; what
    // it is made of follows.
    kBegin,
    kGradient,  // of parameter `what` is there, whole; `other`: its allocation
  };
  Kind kind = Kind::kOperator;
  bool backward = false;
  int32_t what = 0;
  // Parameter whose module is in use: the last one used, in forward; in
  // backward that of the forward operator. -1: none yet.
  int32_t unit = -1;
  // kGradient: allocation that it lies in; -1: not of the trace.
  int32_t other = -1;
  // Bytes of the allocation. kOperator: bytes that its kernel took and freed.
  int64_t bytes = 0;
  int64_t flops = 0;        // kOperator: multiplications and additions
  int64_t moved_bytes = 0;  // kOperator: of its arguments and results
  // In backward: the number of events before the forward operator whose node
  // runs; -1: not known.
  int64_t forward = -1;
};

// Uses of an allocation, besides its events, as numbers of events; -1: never.
struct TracedAllocation {
  int64_t last_forward_use = -1;  // by an operator
  int64_t first_backward_use = -1;
  int32_t cast_of = -1;  // parameter, of whose values it is a copy in a dtype
};

// An operator reads or writes values of an allocation.
struct TracedUse {
  int64_t event = 0;  // events before; the next kOperator is that operator's
  int32_t allocation = 0;
  bool written = false;
};

class TraceLog {
 public:
  int32_t Allocated(int64_t bytes);
  // Records that an operator is about to use an allocation: to read its
  // `values` (not if it only makes a view, or is made of others), or to write
  // them.
  void Used(int32_t allocation, bool values, bool written);
  void IsCast(int32_t allocation, int32_t of_parameter);
  // Does nothing after Close.
  void Freed(int32_t allocation, int64_t bytes);
  void Operator(const std::string& name, int64_t temporary_bytes, int64_t flops,
                int64_t moved_bytes);
  void Begins(int32_t parameter);
  void Touched(int32_t parameter);
  void Gradient(int32_t parameter, int32_t allocation);
  void BeginBackward();
  // Sets on whose behalf the next events are; `forward` as in TraceEvent.
  void SetUnit(int32_t unit, int64_t forward = -1);
  int32_t unit() const;
  int64_t num_events() const;
  bool backward() const;

  struct Record {
    std::vector<TraceEvent> events;
    std::vector<std::string> operators;
    std::vector<TracedAllocation> allocations;
    std::vector<TracedUse> uses;
  };
  // Ends the log and takes it.
  Record Close();

 private:
  void Add(TraceEvent event) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  mutable absl::Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  bool backward_ ABSL_GUARDED_BY(mutex_) = false;
  int32_t unit_ ABSL_GUARDED_BY(mutex_) = -1;
  int64_t forward_ ABSL_GUARDED_BY(mutex_) = -1;
  Record record_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<std::string, int32_t> operator_index_
      ABSL_GUARDED_BY(mutex_);
};

}  // namespace tessera
#endif  // SHARDING_TRACE_TRACE_LOG_H_
