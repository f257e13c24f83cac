// Reads and writes the config.json of Hugging Face's LlamaForCausalLM: the
// sizes of a model.
//
// Keys are LlamaConfig's; absent ones have its defaults. A key that changes a
// model's values and is not supported here (another activation, rope_type
// "yarn", ...) is refused by name; one that does not (bos_token_id, use_cache,
// ...) is ignored.
#ifndef EXAMPLES_LLAMA_LLAMA_CONFIG_H_
#define EXAMPLES_LLAMA_LLAMA_CONFIG_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "examples/llama/llama.h"

// Reads `path`, the file or the folder that contains it. LOCAL. Returns
// NotFound and so on, and InvalidArgument or Unimplemented with file, line,
// column and key.
absl::StatusOr<LlamaOptions> ReadLlamaConfig(const std::string& path);
// Parses a text; `where` is used in messages.
absl::StatusOr<LlamaOptions> ParseLlamaConfig(absl::string_view text,
                                              absl::string_view where);

// Returns the config.json that transformers need to load a model of these
// sizes.
std::string LlamaConfigJson(const LlamaOptions& options);
// Writes it to dir/config.json. LOCAL: one rank calls it. Returns Unavailable,
// naming the file, if it cannot be written.
absl::Status WriteLlamaConfig(const LlamaOptions& options,
                              const std::string& dir);

#endif  // EXAMPLES_LLAMA_LLAMA_CONFIG_H_
