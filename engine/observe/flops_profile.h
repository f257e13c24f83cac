// FlopsProfile: counts the floating-point operations of one forward, by
// operator, and by the unit whose parameter was the last one to be used:
// C++ modules do not tell when their forward runs, and a product of two
// activations belongs to the unit whose weights came before it.
//
// It counts in all threads of the process, so two models that run forwards at
// the same time are both counted. Operators are slower while it runs: each one
// is looked at.
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
  std::map<std::string, Sum> by_operator, by_unit;  // only those with flops
  int64_t total() const;
};

class FlopsProfile {
 public:
  FlopsProfile() = default;
  ~FlopsProfile();
  FlopsProfile(FlopsProfile&&) = delete;

  // Starts counting, until Stop. LOCAL.
  void Start();
  // Stops counting; the forward took `seconds`. LOCAL.
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

// The run that a profile belongs to, for its table.
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
