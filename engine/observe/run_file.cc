#include "engine/observe/run_file.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/json.h"
#include "config/config_text.h"
#include "engine/api/version.h"
#include "engine/plan/plan.h"

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

}  // namespace

std::string RunJson(const ShardedModel& model, const proto::Config& config,
                    const PlanReport* plan, const RunDescription& run) {
  std::string text = absl::StrCat(
      "{\"version\": ", QuoteJson(kTesseraVersion),
      ", \"world_size\": ", model.comm()->world_size(),
      ", \"backend\": ", QuoteJson(model.comm()->backend()),
      ", \"device\": ", QuoteJson(model.device().str()),
      ", \"stage\": ", model.stage(), ", \"parameters\": ", run.parameters,
      ",\n \"hosts\": ", Strings(run.hosts), ",\n \"units\": ", Units(model));
  absl::StrAppendFormat(&text, ",\n \"start_time\": %.6f",
                        run.start_unix_seconds);
  if (plan != nullptr) {
    absl::StrAppend(&text, ",\n \"plan\": ", QuoteJson(plan->ToString()));
  }
  return absl::StrCat(text, ",\n \"config\": ", ConfigToJson(config), "}\n");
}

}  // namespace tessera
