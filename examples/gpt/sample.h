// Sample: text from a Gpt, byte by byte.
#ifndef EXAMPLES_GPT_SAMPLE_H_
#define EXAMPLES_GPT_SAMPLE_H_

#include <cstdint>
#include <string>

#include "examples/gpt/gpt.h"

struct SampleOptions {
  int64_t bytes = 200;       // how many to add to the prompt
  double temperature = 0.8;  // 0 takes the likeliest byte each time
  int64_t top_k = 40;        // of the likeliest bytes; 0: of all
  uint64_t seed = 0;         // of a generator of its own
};

// Returns what the model writes after `prompt`, without the prompt; an empty
// prompt stands for a line's end. The model sees the last seq bytes. Gradients
// and dropout are off meanwhile. Where the model is sharded over ranks, call
// this on all of them with the same arguments: each byte is one forward.
std::string Sample(Gpt model, const std::string& prompt,
                   const SampleOptions& options = {});

// `text` with everything but printable ASCII and line ends as \xHH.
std::string Printable(const std::string& text);

#endif  // EXAMPLES_GPT_SAMPLE_H_
