#include "engine/train/step_tracer.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/log.h"
#include "base/thread/start_thread.h"
#include "base/trace/trace.h"
#include "base/trace/trace_json.h"
#include "config/config.pb.h"

namespace tessera {
namespace {

bool Wanted(const proto::Trace& config, int rank) {
  if (!config.enabled()) return false;
  return config.ranks().empty() ||
         std::find(config.ranks().begin(), config.ranks().end(), rank) !=
             config.ranks().end();
}

std::string HostName() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "";
  return name.data();
}

void Warn(const absl::Status& status) {
  if (status.ok()) return;
  TESSERA_LOG(WARNING) << "trace: " << status.message()
                       << "; training continues without the file";
}

// The rank in "trace.rank7.json" or "kineto.rank7.json"; -1 in another name.
int RankIn(absl::string_view name) {
  int rank = -1;
  const bool is_ours = (absl::ConsumePrefix(&name, "trace.rank") ||
                        absl::ConsumePrefix(&name, "kineto.rank")) &&
                       absl::ConsumeSuffix(&name, ".json") &&
                       absl::SimpleAtoi(name, &rank);
  return is_ours ? rank : -1;
}

// Files of the recording before, of which nothing is a part of this one, are
// kept as NAME.previous: each rank its own, the first that records also those
// of ranks that do not.
void SetAside(const proto::Trace& config, const TraceProcess& process) {
  bool is_first = true;
  for (int rank = 0; rank < process.rank; ++rank) {
    is_first = is_first && !Wanted(config, rank);
  }
  const auto is_older = [&](int rank) {
    return rank == process.rank ||
           (is_first && (rank >= process.world_size || !Wanted(config, rank)));
  };
  std::error_code error;
  std::vector<std::string> older;
  std::filesystem::directory_iterator entries(config.output_path(), error);
  while (!error && entries != std::filesystem::directory_iterator()) {
    const int rank = RankIn(entries->path().filename().string());
    if (rank >= 0 && is_older(rank)) older.push_back(entries->path());
    entries.increment(error);
  }
  for (const std::string& path : older) {
    std::filesystem::rename(path, path + ".previous", error);
    if (error) Warn(FileError(error.value(), path));
  }
}

// What is written when a recording has ended.
struct Files {
  TraceRecording recording;
  TraceProcess process;
  proto::Trace config;
  KinetoTrace::Result kineto;

  void Write() const {
    SetAside(config, process);
    const std::string& folder = config.output_path();
    const std::string rank = absl::StrCat(".rank", process.rank, ".json");
    Warn(WriteFileAtomically(absl::StrCat(folder, "/trace", rank),
                             TraceToJson(recording, process)));
    if (recording.left_out > 0) {
      TESSERA_LOG(WARNING) << "trace: " << recording.left_out
                           << " spans are left out after the first "
                           << recording.spans.size()
                           << "; record fewer steps (trace.end_step)";
    }
    if (kineto != nullptr) {
      Warn(KinetoTrace::Save(*kineto, absl::StrCat(folder, "/kineto", rank)));
    }
  }
};

}  // namespace

void StepTracer::Begin() {
  const proto::Trace& config = config_.trace();
  const bool wanted = Wanted(config, model_.comm()->rank());
  if (wanted && config.start_step() == 1) Start();
}

void StepTracer::Start() {
  if (!StartTrace()) {
    TESSERA_LOG(WARNING) << "trace: another engine of this process records; "
                            "this one's steps are in its files";
    return;
  }
  records_ = true;
  step_begin_ = phase_end_ = TraceNow();
  if (config_.trace().kineto()) {
    Warn(kineto_.Start(model_.device()));
  }
}

void StepTracer::EndForward() {
  if (!records_) return;
  AddTraceSpan({TraceTrack::kMain, "forward", phase_end_, TraceNow()});
}

void StepTracer::EndBackward() { phase_end_ = records_ ? TraceNow() : 0; }

void StepTracer::EndStep(int64_t step, int64_t update) {
  const proto::Trace& config = config_.trace();
  if (!config.enabled()) return;
  ++steps_;
  if (records_) {
    const int64_t now = TraceNow();
    AddTraceSpan({TraceTrack::kSteps, absl::StrCat("step ", step), step_begin_,
                  now, "", -1,
                  absl::StrCat("\"step\":", step, ",\"update\":", update)});
    step_begin_ = phase_end_ = now;
    if (steps_ >= config.end_step()) Finish();
  } else if (steps_ + 1 == config.start_step() &&
             Wanted(config, model_.comm()->rank())) {
    Start();
  }
}

void StepTracer::Finish() {
  records_ = false;
  auto files = std::make_shared<Files>();
  auto kineto = kineto_.Stop();
  if (kineto.ok()) files->kineto = *std::move(kineto);
  Warn(kineto.status());
  files->recording = StopTrace();
  files->process = {model_.comm()->rank(), model_.comm()->world_size(),
                    HostName()};
  files->config = config_.trace();
  auto thread = StartThread("tessera-trace", [files] { files->Write(); });
  if (thread.ok()) {
    writer_ = *std::move(thread);
  } else {
    files->Write();
  }
}

void StepTracer::End() {
  if (records_) Finish();
  if (writer_.joinable()) writer_.join();
}

}  // namespace tessera
