// FlopsProfile: counts the floating-point operations of one forward, by
// operator, and by the unit whose parameter was the last one to be used:
// C++ modules do not tell when their forward runs, and a product of two
// activations belongs to the unit whose weights came before it.
//
// Of all threads of the process; so of two models that run forwards at that
// time both are counted. Slower while it runs: every operator is looked at.
#ifndef ENGINE_OBSERVE_FLOPS_PROFILE_H_
#define ENGINE_OBSERVE_FLOPS_PROFILE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace tessera {

namespace proto {
class FlopsProfiler;
}

struct FlopCounts {
  struct Sum {
    int64_t calls = 0, flops = 0;
  };
  std::map<std::string, Sum> by_operator, by_unit;  // what has flops
  int64_t total() const;
};

class FlopsProfile {
 public:
  FlopsProfile() = default;
  ~FlopsProfile();
  FlopsProfile(FlopsProfile&&) = delete;

  // Counts from now on, until Stop. LOCAL.
  void Start();
  // The forward took `seconds`. LOCAL.
  void Stop(double seconds);
  bool runs() const { return running_.has_value(); }
  bool done() const { return done_; }
  const FlopCounts& counts() const { return counts_; }
  double seconds() const { return seconds_; }

 private:
  std::optional<uint64_t> running_;  // libtorch's handle of the callback
  FlopCounts counts_;
  double seconds_ = 0;
  bool done_ = false;
};

// What was counted, for people.
struct FlopsProfileContext {
  int64_t step = 0;  // whose forward it was, from 1 on
  int world_size = 1;
  int64_t parameters = 0;  // of the model
  int64_t micro_batches = 1, micro_batch_samples = 0;
};
std::string FlopsTable(const FlopCounts& counts, double seconds,
                       const FlopsProfileContext& context,
                       const proto::FlopsProfiler& config);

}  // namespace tessera
#endif  // ENGINE_OBSERVE_FLOPS_PROFILE_H_
