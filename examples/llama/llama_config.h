// The config.json of Hugging Face's LlamaForCausalLM: the sizes of a model.
//
// Keys are LlamaConfig's; absent ones have its defaults. What changes a model's
// values and is not to be had here (another activation, rope_type "yarn", ...)
// is refused by name; what changes none (bos_token_id, use_cache, ...) is not
// looked at.
#ifndef EXAMPLES_LLAMA_LLAMA_CONFIG_H_
#define EXAMPLES_LLAMA_LLAMA_CONFIG_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "examples/llama/llama.h"

// `path`: the file, or the folder that it is in. LOCAL. NotFound and so on;
// InvalidArgument and Unimplemented with file, line, column and key.
absl::StatusOr<LlamaOptions> ReadLlamaConfig(const std::string& path);
// The same for a text; `where` is used in messages.
absl::StatusOr<LlamaOptions> ParseLlamaConfig(absl::string_view text,
                                              absl::string_view where);

// The way back: what transformers need to load a model of these sizes.
std::string LlamaConfigJson(const LlamaOptions& options);
// Writes it to dir/config.json. LOCAL: one rank's work. Unavailable, naming the
// file, where it cannot be written.
absl::Status WriteLlamaConfig(const LlamaOptions& options,
                              const std::string& dir);

#endif  // EXAMPLES_LLAMA_LLAMA_CONFIG_H_
