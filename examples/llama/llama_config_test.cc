#include "examples/llama/llama_config.h"

#include <string>

#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

using ::testing::HasSubstr;

// That of Llama 3.2's model of one thousand million parameters, as transformers
// 4 wrote it, in what counts.
constexpr char kLlama32[] = R"({
  "architectures": ["LlamaForCausalLM"], "attention_bias": false,
  "attention_dropout": 0.0, "bos_token_id": 128000, "head_dim": 64,
  "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
  "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0,
    "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true,
  "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 128256})";

void ExpectLlama32(const LlamaOptions& options) {
  EXPECT_EQ(options.dim(), 2048);
  EXPECT_EQ(options.layers(), 16);
  EXPECT_EQ(options.heads(), 32);
  EXPECT_EQ(options.kv_heads(), 8);
  EXPECT_EQ(options.width_of_head(), 64);
  EXPECT_EQ(options.hidden(), 8192);
  EXPECT_EQ(options.vocab(), 128256);
  EXPECT_EQ(options.positions(), 131072);
  EXPECT_EQ(options.norm_eps(), 1e-5);
  EXPECT_TRUE(options.tied());
  EXPECT_FALSE(options.attention_bias());
  EXPECT_FALSE(options.mlp_bias());
  EXPECT_EQ(options.rope().theta(), 500000);
  EXPECT_EQ(options.rope().scaling(), RopeScaling::kLlama3);
  EXPECT_EQ(options.rope().factor(), 32);
  EXPECT_EQ(options.rope().low_frequency_factor(), 1);
  EXPECT_EQ(options.rope().high_frequency_factor(), 4);
  EXPECT_EQ(options.rope().original_positions(), 8192);
}

TEST(LlamaConfigTest, ReadsWhatTransformersWrite) {
  const auto options = ParseLlamaConfig(kLlama32, "config.json");
  ASSERT_TRUE(options.ok()) << options.status();
  ExpectLlama32(*options);
}

TEST(LlamaConfigTest, WritesWhatItReads) {
  const auto options = ParseLlamaConfig(kLlama32, "config.json");
  ASSERT_TRUE(options.ok()) << options.status();
  const auto again = ParseLlamaConfig(LlamaConfigJson(*options), "again");
  ASSERT_TRUE(again.ok()) << again.status();
  ExpectLlama32(*again);
  const auto linear = ParseLlamaConfig(
      LlamaConfigJson(LlamaOptions().rope(
          RopeOptions().scaling(RopeScaling::kLinear).factor(2))),
      "linear");
  ASSERT_TRUE(linear.ok()) << linear.status();
  EXPECT_EQ(linear->rope().scaling(), RopeScaling::kLinear);
  EXPECT_EQ(linear->rope().factor(), 2);
}

TEST(LlamaConfigTest, ReadsTheFileThatIsShipped) {
  const auto options = ReadLlamaConfig("examples/llama/tiny.json");
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->dim(), 64);
  EXPECT_EQ(ReadLlamaConfig("no/such.json").status().code(),
            absl::StatusCode::kNotFound);
}

std::string Refusal(const std::string& text) {
  return std::string(ParseLlamaConfig(text, "c.json").status().message());
}

TEST(LlamaConfigTest, RefusesByName) {
  EXPECT_EQ(Refusal(R"({"hidden_act": "gelu"})"),
            "c.json:1:16: hidden_act: \"gelu\" is not supported here; expected "
            "silu");
  EXPECT_THAT(Refusal(R"({"model_type": "gpt2"})"), HasSubstr("model_type"));
  EXPECT_THAT(Refusal(R"({"rope_scaling": {"type": "dynamic"}})"),
              HasSubstr("type: \"dynamic\" is not supported"));
  EXPECT_THAT(Refusal(R"({"attention_dropout": 0.1})"),
              HasSubstr("attention_dropout: 0.1 is not supported"));
  EXPECT_THAT(Refusal(R"({"rope_parameters": {"partial_rotary_factor": 0.5}})"),
              HasSubstr("partial_rotary_factor"));
  EXPECT_THAT(Refusal(R"({"hidden_size": "64"})"),
              HasSubstr("hidden_size: expected a whole number"));
  EXPECT_THAT(Refusal(R"({"hidden_size": 30, "num_attention_heads": 4})"),
              HasSubstr("a multiple of num_attention_heads 4"));
  EXPECT_THAT(Refusal(R"({"num_key_value_heads": 5})"),
              HasSubstr("num_key_value_heads"));
  EXPECT_THAT(Refusal(R"({"head_dim": 3})"), HasSubstr("an even number"));
  EXPECT_THAT(Refusal("[]"), HasSubstr("an object"));
}

}  // namespace
