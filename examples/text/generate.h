// Generates tokens with a model, one forward for each.
#ifndef EXAMPLES_TEXT_GENERATE_H_
#define EXAMPLES_TEXT_GENERATE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

struct GenerateOptions {
  int64_t count = 100;       // tokens to add
  int64_t context = 64;      // the most tokens of the text that the model sees
  double temperature = 0.8;  // 0 takes the likeliest each time
  int64_t top_k = 0;         // choose among this many likeliest tokens; 0: all
  uint64_t seed = 1;         // for a generator of its own
};

// Maps tokens [1, T] of int64 on the CPU to logits [1, T, vocab].
using Forward = std::function<at::Tensor(const at::Tensor& tokens)>;

// Returns what `forward` writes after `prompt`, which is not empty and not part
// of the result. If the model is sharded over ranks, call this on all of them
// with the same arguments. Computes no gradients.
std::vector<int64_t> Generate(const Forward& forward,
                              std::vector<int64_t> prompt,
                              const GenerateOptions& options);

// Convert between the bytes of `text` and tokens; a token that is no byte gives
// '?'.
std::vector<int64_t> TokensOf(const std::string& text);
std::string TextOf(const std::vector<int64_t>& tokens);

// Returns `text` with everything except printable ASCII and line ends as \xHH,
// since a terminal would obey some of it.
std::string Printable(const std::string& text);

#endif  // EXAMPLES_TEXT_GENERATE_H_
