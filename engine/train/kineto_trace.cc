#include "engine/train/kineto_trace.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "torch/csrc/autograd/profiler_kineto.h"
#include "torch/csrc/profiler/orchestration/observer.h"

namespace tessera {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

}  // namespace

absl::Status KinetoTrace::Start(c10::Device device) {
  if (torch::profiler::impl::profilerEnabled()) {
    return absl::FailedPreconditionError(
        "the program runs libtorch's profiler already; set trace.kineto to "
        "false, or end it before the steps that are recorded");
  }
  return CatchTorch("libtorch's profiler", [&] {
    const ProfilerConfig config(ProfilerState::KINETO);
    std::set<ActivityType> activities = {ActivityType::CPU};
    if (device.is_cuda()) activities.insert(ActivityType::CUDA);
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
    runs_ = true;
  });
}

absl::StatusOr<KinetoTrace::Result> KinetoTrace::Stop() {
  if (!std::exchange(runs_, false)) return nullptr;
  if (!torch::profiler::impl::profilerEnabled()) {
    return absl::FailedPreconditionError(
        "libtorch's profiler was started on another thread, or the program "
        "has ended it");
  }
  Result result;
  TESSERA_RETURN_IF_ERROR(CatchTorch(
      "libtorch's profiler", [&] { result = profiler::disableProfiler(); }));
  return result;
}

absl::Status KinetoTrace::Save(profiler::ProfilerResult& result,
                               const std::string& path) {
  std::error_code error;
  const std::filesystem::path parent =
      std::filesystem::path(path).parent_path();
  if (!parent.empty()) std::filesystem::create_directories(parent, error);
  if (error) return FileError(error.value(), parent.string());
  const std::string made = absl::StrCat(path, ".part");
  absl::Status saved =
      CatchTorch("libtorch's profiler", [&] { result.save(made); });
  if (saved.ok() && std::rename(made.c_str(), path.c_str()) != 0) {
    saved = FileError(errno, path);
  }
  if (!saved.ok()) std::filesystem::remove(made, error);
  return saved;
}

}  // namespace tessera
