#include "examples/llama/llama_config.h"

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/status.h"
#include "config/reader/json_reader.h"
#include "examples/llama/config_keys.h"

namespace {

using tessera::JsonKind;
using tessera::JsonValue;

// transformers 5 write rope_parameters, with the theta in it; before that
// rope_theta and rope_scaling were two keys, whose type was once called "type".
absl::StatusOr<RopeOptions> ReadRope(LlamaConfigKeys* config,
                                     absl::string_view where) {
  RopeOptions rope;
  config->Read("rope_theta", &rope.theta());
  const JsonValue* object = config->Object("rope_parameters");
  if (object == nullptr) object = config->Object("rope_scaling");
  if (object == nullptr) return rope;
  LlamaConfigKeys keys(object, where);
  keys.Read("rope_theta", &rope.theta());
  const char* const key =
      object->Find("rope_type") != nullptr || object->Find("type") == nullptr
          ? "rope_type"
          : "type";
  const std::string type = keys.OneOf(key, {"default", "linear", "llama3"});
  keys.Usual("partial_rotary_factor", 1);
  if (type != "default") keys.Read("factor", &rope.factor());
  if (type == "linear") rope.scaling(RopeScaling::kLinear);
  if (type == "llama3") {
    rope.scaling(RopeScaling::kLlama3);
    keys.Read("low_freq_factor", &rope.low_frequency_factor());
    keys.Read("high_freq_factor", &rope.high_frequency_factor());
    keys.Read("original_max_position_embeddings", &rope.original_positions());
    if (rope.high_frequency_factor() <= rope.low_frequency_factor()) {
      keys.Refuse(*object,
                  "high_freq_factor: expected more than "
                  "low_freq_factor");
    }
  }
  TESSERA_RETURN_IF_ERROR(keys.status());
  return rope;
}

std::string RopeJson(const RopeOptions& rope) {
  std::string json = absl::StrFormat("\"rope_theta\": %.17g", rope.theta());
  switch (rope.scaling()) {
    case RopeScaling::kNone:
      return absl::StrCat(json, ", \"rope_type\": \"default\"");
    case RopeScaling::kLinear:
      return absl::StrFormat("%s, \"rope_type\": \"linear\", \"factor\": %.17g",
                             json, rope.factor());
    case RopeScaling::kLlama3:
      return absl::StrFormat(
          "%s, \"rope_type\": \"llama3\", \"factor\": %.17g, "
          "\"low_freq_factor\": %.17g, \"high_freq_factor\": %.17g, "
          "\"original_max_position_embeddings\": %d",
          json, rope.factor(), rope.low_frequency_factor(),
          rope.high_frequency_factor(), rope.original_positions());
  }
  return json;
}

}  // namespace

absl::StatusOr<LlamaOptions> ParseLlamaConfig(absl::string_view text,
                                              absl::string_view where) {
  TESSERA_ASSIGN_OR_RETURN(const JsonValue json,
                           tessera::ReadJson(text, where));
  if (json.kind != JsonKind::kObject) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": expected an object of LlamaConfig's keys"));
  }
  LlamaConfigKeys keys(&json, where);
  keys.OneOf("model_type", {"llama"});
  keys.OneOf("hidden_act", {"silu"});
  keys.Usual("attention_dropout", 0);
  keys.Usual("partial_rotary_factor", 1);
  // These are LlamaConfig's defaults, those of the first Llama.
  LlamaOptions options;
  options.dim(4096).layers(32).heads(32).hidden(11008).vocab(32000);
  options.norm_eps(1e-6);
  keys.Read("hidden_size", &options.dim());
  keys.Read("num_hidden_layers", &options.layers());
  keys.Read("num_attention_heads", &options.heads());
  options.kv_heads(options.heads());
  keys.Read("num_key_value_heads", &options.kv_heads());
  keys.Read("intermediate_size", &options.hidden());
  keys.Read("vocab_size", &options.vocab());
  keys.Read("head_dim", &options.head_dim());
  keys.Read("rms_norm_eps", &options.norm_eps());
  keys.Read("tie_word_embeddings", &options.tied());
  keys.Read("attention_bias", &options.attention_bias());
  keys.Read("mlp_bias", &options.mlp_bias());
  keys.Read("max_position_embeddings", &options.positions());
  TESSERA_ASSIGN_OR_RETURN(options.rope(), ReadRope(&keys, where));
  const int64_t heads = options.heads();
  if (options.head_dim() == 0 && options.dim() % heads != 0) {
    keys.Refuse(json, absl::StrCat("hidden_size: expected a multiple of ",
                                   "num_attention_heads ", heads, ", got ",
                                   options.dim()));
  } else if (options.width_of_head() % 2 != 0) {
    keys.Refuse(json, absl::StrCat("head_dim: expected an even number, got ",
                                   options.width_of_head()));
  } else if (heads % options.kv_heads() != 0) {
    keys.Refuse(json, absl::StrCat("num_key_value_heads: expected a divisor "
                                   "of num_attention_heads ",
                                   heads, ", got ", options.kv_heads()));
  }
  TESSERA_RETURN_IF_ERROR(keys.status());
  return options;
}

absl::StatusOr<LlamaOptions> ReadLlamaConfig(const std::string& path) {
  std::string file = path;
  if (std::error_code error; std::filesystem::is_directory(path, error)) {
    file += "/config.json";
  }
  TESSERA_ASSIGN_OR_RETURN(const std::string text,
                           tessera::ReadWholeFile(file));
  return ParseLlamaConfig(text, file);
}

std::string LlamaConfigJson(const LlamaOptions& options) {
  const auto boolean = [](bool value) { return value ? "true" : "false"; };
  return absl::StrFormat(
      R"({
  "architectures": ["LlamaForCausalLM"],
  "model_type": "llama",
  "hidden_act": "silu",
  "hidden_size": %d,
  "num_hidden_layers": %d,
  "num_attention_heads": %d,
  "num_key_value_heads": %d,
  "head_dim": %d,
  "intermediate_size": %d,
  "vocab_size": %d,
  "max_position_embeddings": %d,
  "rms_norm_eps": %.17g,
  "tie_word_embeddings": %s,
  "attention_bias": %s,
  "mlp_bias": %s,
  "bos_token_id": null,
  "eos_token_id": null,
  "rope_parameters": {%s}
}
)",
      options.dim(), options.layers(), options.heads(), options.kv_heads(),
      options.width_of_head(), options.hidden(), options.vocab(),
      options.positions(), options.norm_eps(), boolean(options.tied()),
      boolean(options.attention_bias()), boolean(options.mlp_bias()),
      RopeJson(options.rope()));
}

absl::Status WriteLlamaConfig(const LlamaOptions& options,
                              const std::string& dir) {
  const std::string path = dir + "/config.json";
  std::ofstream file(path);
  file << LlamaConfigJson(options) << std::flush;
  return file ? absl::OkStatus()
              : absl::UnavailableError(
                    absl::StrCat(path, " could not be written"));
}
