// The flags of examples/gpt:train.
#ifndef EXAMPLES_GPT_FLAGS_H_
#define EXAMPLES_GPT_FLAGS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "examples/gpt/gpt.h"
#include "examples/text/generate.h"

struct TrainFlags {
  int64_t stage = -1;    // -1: the config's
  std::string dtype;     // fp32, bf16, fp16; "": the config's
  int64_t steps = 100;   // trained first; then the state is saved
  int64_t after = 0;     // trained after that; their losses are reported one by
                         // one
  std::string data;      // any file
  int64_t held_out = 0;  // samples at its end that are not trained on; their
                         // loss is reported
  uint64_t seed = 1;
  std::string save;    // a folder, created or replaced; "": nothing is saved
  std::string resume;  // a folder that --save wrote
  std::string prompt = "In the beginning ";
  // --sample bytes, each of the 40 likeliest, with the model's own context.
  GenerateOptions sample{/*count=*/0, /*context=*/0, /*temperature=*/0.8,
                         /*top_k=*/40, /*seed=*/0};
  bool chunked_loss = false;  // the logits are computed in chunks of tokens
  GptOptions model;
  bool ignore_unknown = false;  // keys of the config: a warning each
  bool json = false;
  bool quiet = false;
};

// Returns the values that absl's flags have. Returns InvalidArgument with one
// line that names the flag whose value does not fit.
absl::StatusOr<TrainFlags> ReadTrainFlags();
// Returns the keys of the configuration that they set.
std::vector<std::string> ConfigKeys(const TrainFlags& flags);

#endif  // EXAMPLES_GPT_FLAGS_H_
