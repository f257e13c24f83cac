#include "engine/observe/run_file.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/json.h"
#include "config/config.pb.h"
#include "config/config_text.h"
#include "engine/api/version.h"
#include "engine/plan/plan.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

std::string Strings(const std::vector<std::string>& list) {
  return absl::StrCat(
      "[",
      absl::StrJoin(list, ", ",
                    [](std::string* out, const std::string& text) {
                      absl::StrAppend(out, QuoteJson(text));
                    }),
      "]");
}

std::string Units(const ShardedModel& model) {
  return absl::StrCat(
      "[",
      absl::StrJoin(
          model.flats(), ", ",
          [](std::string* out, const std::shared_ptr<FlatParameter>& flat) {
            int64_t numel = 0;
            for (const auto& p : flat->parameters()) numel += p.tensor.numel();
            absl::StrAppend(out, "{\"name\": ", QuoteJson(flat->name()),
                            ", \"parameters\": ", flat->parameters().size(),
                            ", \"elements\": ", numel, "}");
          }),
      "]");
}

// Returns the name of the module's class: "my::Net" of a "my::NetImpl".
std::string ModelName(const ShardedModel& model) {
  const std::string& name = model.module().name();
  return std::string(absl::StripSuffix(name, "Impl"));
}

// What the plan says of the configured stage. It knows nothing of collectives
// if only one rank was measured.
std::string Planned(const PlanReport& plan, const ShardedModel& model) {
  for (const StagePlan& stage : plan.stages) {
    if (stage.stage != model.stage()) continue;
    std::string text = absl::StrCat("{\"peak_bytes\": ", stage.peak.total());
    if (plan.rates.has_value() &&
        (plan.world_size == 1 || plan.rates->world_size > 1)) {
      absl::StrAppendFormat(&text, ", \"step_ms\": %.6g",
                            1000 * stage.seconds.total());
    }
    return absl::StrCat(text, "}");
  }
  return "{}";
}

}  // namespace

RunStart StartOf(const ShardedModel& model, double start_unix_seconds) {
  return {start_unix_seconds, model.comm()->world_size(), model.stage()};
}

std::string RunJson(const ShardedModel& model, const proto::Config& config,
                    const PlanReport* plan, const RunDescription& run) {
  proto::Config shown = config;  // without secrets
  if (shown.comet().has_api_key()) shown.mutable_comet()->set_api_key("***");
  std::string text = absl::StrCat(
      "{\"version\": ", QuoteJson(kTesseraVersion),
      ", \"model\": ", QuoteJsonBytes(ModelName(model)),
      ",\n \"command\": ", QuoteJson(run.command),
      ",\n \"world_size\": ", model.comm()->world_size(),
      ", \"backend\": ", QuoteJson(model.comm()->backend()),
      ", \"device\": ", QuoteJson(model.device().str()),
      ", \"stage\": ", model.stage(), ", \"parameters\": ", run.parameters,
      ",\n \"hosts\": ", Strings(run.hosts), ",\n \"units\": ", Units(model));
  absl::StrAppendFormat(&text, ",\n \"start_time\": %.6f",
                        run.start_unix_seconds);
  absl::StrAppend(
      &text, ",\n \"starts\": ",
      StartsJson(run.earlier, StartOf(model, run.start_unix_seconds)));
  if (plan != nullptr) {
    absl::StrAppend(&text, ",\n \"planned\": ", Planned(*plan, model),
                    ",\n \"plan\": ", QuoteJson(plan->ToString()));
  }
  return absl::StrCat(text, ",\n \"config\": ", ConfigToJson(shown), "}\n");
}

}  // namespace tessera
