// GatherTrace: records a gather for the trace of a run.
#ifndef SHARDING_FLAT_GATHER_TRACE_H_
#define SHARDING_FLAT_GATHER_TRACE_H_

#include <cstdint>
#include <string>

namespace tessera {

class GatherTrace {
 public:
  // A gather begins; `ahead`: before it was asked for.
  void Begin(bool ahead);
  // The gather has ended.
  void End(const std::string& unit, int64_t bytes);

 private:
  int64_t begun_ = 0;  // 0: nothing is recorded
  bool ahead_ = false;
};

}  // namespace tessera
#endif  // SHARDING_FLAT_GATHER_TRACE_H_
