#include "tests/observe/metrics_lines.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/status_matchers.h"
#include "config/reader/json_reader.h"

namespace tessera {

std::string Jsonl(const std::string& folder) {
  return absl::StrCat("jsonl_monitor{enabled:true,output_path:'", folder,
                      "',job_name:'run'}");
}

std::string Everything(const std::string& folder) {
  return absl::StrCat(
      Jsonl(folder), ",csv_monitor{enabled:true,output_path:'", folder,
      "',job_name:'csv'},tensorboard{enabled:true,output_path:'", folder,
      "',job_name:'events'},steps_per_print:2,wall_clock_breakdown:true,"
      "histograms{every_steps:1},"
      "flops_profiler{enabled:true,profile_step:1,peak_tflops:0.001,"
      "output_file:'",
      folder, "/flops'},comms_logger{enabled:true}");
}

std::vector<Line> LinesOf(const std::string& folder) {
  const auto text = ReadWholeFile(folder + "/run/metrics.jsonl");
  TESSERA_EXPECT_OK(text.status());
  std::vector<Line> lines;
  for (absl::string_view line :
       absl::StrSplit(text.value_or(""), '\n', absl::SkipEmpty())) {
    const auto object = ReadJson(line, "metrics.jsonl");
    TESSERA_EXPECT_OK(object.status());
    lines.emplace_back();
    for (const JsonMember& member : object->members) {
      lines.back()[member.key] = member.value.kind == JsonKind::kNumber
                                     ? member.value.number
                                     : std::nan("");
    }
  }
  return lines;
}

}  // namespace tessera
