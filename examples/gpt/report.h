// Prints a run's table at its start and its JSON at its end.
#ifndef EXAMPLES_GPT_REPORT_H_
#define EXAMPLES_GPT_REPORT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/engine.h"

// The figures of a run. Losses are means over all ranks.
struct RunReport {
  std::vector<float> losses;        // of the steps before the state was saved
  std::vector<float> after_losses;  // of the steps after it
  // The loss of the text that is not trained on, with the parameters before
  // `after`.
  std::optional<float> held_out_loss;
  bool resumed = false;          // the run began from a saved state
  double tokens_per_second = 0;  // of all ranks together
  int world_size = 1;
  int stage = 0;
  tessera::StateBytes held;        // by rank 0
  tessera::StateBytes replicated;  // what it would hold without shards
  std::string sample;
};

// Returns a table of what each rank holds, and what it would hold if everything
// were replicated.
std::string StateTable(const RunReport& report);

// Returns one line of JSON: first_loss, last_loss, losses,
// uninterrupted_losses, resumed_losses, tok_s, held_out_loss, world, stage,
// bytes_per_rank, replicated_bytes, sample. Lists hold hexadecimal floats.
// after_losses is in uninterrupted_losses if the run began anew, in
// resumed_losses if it was resumed. A number that JSON cannot express is null.
// Bytes of the sample that are not ASCII appear as the character of that
// number.
std::string ToJson(const RunReport& report);

#endif  // EXAMPLES_GPT_REPORT_H_
