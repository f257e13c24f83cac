// The flags of benchmarks/train, and what they make: a configuration, options
// for plain libtorch.
#ifndef BENCHMARKS_TRAIN_FLAGS_H_
#define BENCHMARKS_TRAIN_FLAGS_H_

#include <cstdint>
#include <string>

#include "absl/flags/declare.h"
#include "absl/status/statusor.h"
#include "benchmarks/gpt/plain_gpt.h"
#include "tessera/tessera.h"

ABSL_DECLARE_FLAG(std::string, data);
ABSL_DECLARE_FLAG(std::string, engine);
ABSL_DECLARE_FLAG(std::string, device);
ABSL_DECLARE_FLAG(bool, device_init);
ABSL_DECLARE_FLAG(double, peak_tflops);
ABSL_DECLARE_FLAG(int64_t, dim);
ABSL_DECLARE_FLAG(int64_t, layers);
ABSL_DECLARE_FLAG(int64_t, heads);
ABSL_DECLARE_FLAG(int64_t, seq);
ABSL_DECLARE_FLAG(int, steps);
ABSL_DECLARE_FLAG(bool, turns);
ABSL_DECLARE_FLAG(std::string, init);

namespace tessera {

// Reads and checks the flags; returns the options for Init. LOCAL.
absl::StatusOr<WorldOptions> ReadTrainFlags(int argc, char** argv);

// Returns that of --config, or else of the other flags. Its
// train_micro_batch_size_per_gpu is set, its gradient_accumulation_steps 1.
absl::StatusOr<proto::Config> ConfigOfFlags(int world_size);
// Returns "fp32", "bf16" or "fp16".
std::string DtypeOf(const proto::Config& config);

PlainGptOptions PlainOptionsOfFlags();

}  // namespace tessera
#endif  // BENCHMARKS_TRAIN_FLAGS_H_
