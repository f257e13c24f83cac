// Fuzz target: any text as a JSON configuration. Reading must end with a config
// that holds what config.h promises, or with a message; never with a crash.
#include <cstddef>
#include <cstdint>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "config/config.h"
#include "google/protobuf/util/message_differencer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using tessera::proto::Config;
  constexpr int kWorldSize = 2;
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
  return 0;
}
