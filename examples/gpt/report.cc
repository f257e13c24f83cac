#include "examples/gpt/report.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/bits.h"
#include "base/json.h"

namespace {

std::string JsonNumber(double value) {
  return std::isfinite(value) ? absl::StrFormat("%.9g", value) : "null";
}

std::string JsonBytes(const tessera::StateBytes& bytes) {
  return absl::StrFormat(
      R"({"parameters": %d, "gradients": %d, "optimizer": %d})",
      bytes.parameters, bytes.gradients, bytes.optimizer);
}

std::string JsonHexList(const std::vector<float>& values) {
  return absl::StrCat(
      "[",
      absl::StrJoin(values, ", ",
                    [](std::string* out, float value) {
                      absl::StrAppend(
                          out, tessera::QuoteJson(tessera::HexFloat(value)));
                    }),
      "]");
}

std::string Row(const char* name, int64_t held, int64_t replicated) {
  return absl::StrFormat("  %-18s %10.1f MB %10.1f MB\n", name, held / 1e6,
                         replicated / 1e6);
}

}  // namespace

std::string StateTable(const RunReport& report) {
  const tessera::StateBytes& held = report.held;
  const tessera::StateBytes& whole = report.replicated;
  return absl::StrCat(
      absl::StrFormat("Each rank holds    %13s %13s\n",
                      absl::StrCat("stage ", report.stage), "replicated"),
      Row("parameters", held.parameters, whole.parameters),
      Row("gradients", held.gradients, whole.gradients),
      Row("optimizer states", held.optimizer, whole.optimizer),
      Row("total", held.total(), whole.total()));
}

std::string ToJson(const RunReport& report) {
  const std::vector<float> none;
  const double unknown = std::nan("");
  const auto& losses = report.losses;
  return absl::StrCat(
      "{\"first_loss\": ", JsonNumber(losses.empty() ? unknown : losses[0]),
      ", \"last_loss\": ", JsonNumber(losses.empty() ? unknown : losses.back()),
      ", \"losses\": ", JsonHexList(losses), ", \"uninterrupted_losses\": ",
      JsonHexList(report.resumed ? none : report.after_losses),
      ", \"resumed_losses\": ",
      JsonHexList(report.resumed ? report.after_losses : none),
      ", \"held_out_loss\": ",
      report.held_out_loss.has_value()
          ? tessera::QuoteJson(tessera::HexFloat(*report.held_out_loss))
          : "null",
      ", \"tok_s\": ", JsonNumber(report.tokens_per_second),
      ", \"world\": ", report.world_size, ", \"stage\": ", report.stage,
      ", \"bytes_per_rank\": ", JsonBytes(report.held),
      ", \"replicated_bytes\": ", JsonBytes(report.replicated),
      ", \"sample\": ", tessera::QuoteJsonBytes(report.sample), "}");
}
