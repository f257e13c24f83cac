// This fuzz target reads any text as a JSON configuration. Reading must end
// with a config that holds what config.h promises, or with a message; never
// with a crash.
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "config/config.h"
#include "config/config_text.h"
#include "config/reader/json_reader.h"
#include "google/protobuf/struct.pb.h"
#include "google/protobuf/util/json_util.h"
#include "google/protobuf/util/message_differencer.h"

namespace {

constexpr int kWorldSize = 2;

// Checks that a configuration, printed and read, is the same again.
void CheckReadsBack(const tessera::proto::Config& config) {
  const std::string json = tessera::ConfigToJson(config);
  const auto from_json = tessera::ParseConfig(json, "json", kWorldSize);
  TESSERA_CHECK_OK(from_json);
  TESSERA_CHECK(tessera::ConfigToJson(*from_json) == json);
  const auto from_text = tessera::ParseConfig(
      tessera::ConfigToText(config, config), "t.textproto", kWorldSize);
  TESSERA_CHECK_OK(from_text);
  TESSERA_CHECK(tessera::ConfigToJson(*from_text) == json);
}

// Checks that without comments and trailing commas a strict parser reads it as
// JSON, too.
void CheckIsJson(absl::string_view text) {
  const auto value = tessera::ReadJson(text, "f.json");
  TESSERA_CHECK_OK(value);
  google::protobuf::Value strict;
  const auto status = google::protobuf::util::JsonStringToMessage(
      tessera::ToJsonText(*value), &strict);
  TESSERA_CHECK(status.ok()) << status.ToString();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tessera::proto::Config;
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const absl::StatusOr<Config> config =
      tessera::ParseConfig(text, "f.json", kWorldSize);
  if (!config.ok()) {
    const absl::string_view message = config.status().message();
    TESSERA_CHECK(absl::StartsWith(message, "f.json:")) << message;
    return 0;
  }
  TESSERA_CHECK_EQ(config->train_batch_size(),
                   config->train_micro_batch_size_per_gpu() *
                       config->gradient_accumulation_steps() * kWorldSize);
  TESSERA_CHECK(config->zero_optimization().has_stage() ||
                config->zero_optimization().auto_stage());
  TESSERA_CHECK_GE(config->zero_optimization().stage(), 0);
  TESSERA_CHECK_LE(config->zero_optimization().stage(), 3);
  const absl::StatusOr<Config> again =
      tessera::ResolveConfig(*config, kWorldSize);
  TESSERA_CHECK_OK(again);
  TESSERA_CHECK(
      google::protobuf::util::MessageDifferencer::Equals(*config, *again));
  CheckReadsBack(*config);
  CheckIsJson(text);
  return 0;
}
