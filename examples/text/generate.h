// Tokens that a model writes, one forward for each.
#ifndef EXAMPLES_TEXT_GENERATE_H_
#define EXAMPLES_TEXT_GENERATE_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

struct GenerateOptions {
  int64_t count = 100;       // tokens to add
  int64_t context = 64;      // the model sees so many of the last, at most
  double temperature = 0.8;  // 0 takes the likeliest each time
  int64_t top_k = 0;         // of the likeliest tokens; 0: of all
  uint64_t seed = 1;         // of a generator of its own
};

// Logits [1, T, vocab] of tokens [1, T] of int64 on the CPU.
using Forward = std::function<at::Tensor(const at::Tensor& tokens)>;

// What `forward` writes after `prompt`, which is not empty, without it. Where
// the model is sharded over ranks, call this on all of them with the same
// arguments. Without gradients.
std::vector<int64_t> Generate(const Forward& forward,
                              std::vector<int64_t> prompt,
                              const GenerateOptions& options);

// The bytes of `text` as tokens, and back; what is no byte is '?'.
std::vector<int64_t> TokensOf(const std::string& text);
std::string TextOf(const std::vector<int64_t>& tokens);

// `text` with everything but printable ASCII and line ends as \xHH, since a
// terminal would obey some of it.
std::string Printable(const std::string& text);

#endif  // EXAMPLES_TEXT_GENERATE_H_
