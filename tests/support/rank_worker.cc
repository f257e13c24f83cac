// Implements a rank's side of a RankPool.
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/env.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "comm/group/group_communicator.h"
#include "tests/support/at_start.h"
#include "tests/support/fork_server.h"
#include "tests/support/rank_frames.h"
#include "tests/support/rank_pool.h"

namespace tessera {
namespace {

std::map<std::string, RankFunction>& Functions() {
  static auto* const functions = new std::map<std::string, RankFunction>;
  return *functions;
}

std::string EncodeAnswer(const absl::StatusOr<std::string>& answer,
                         bool unusable) {
  std::string bytes;
  bytes.push_back(unusable ? 1 : 0);
  bytes.push_back(static_cast<char>(answer.status().code()));
  absl::string_view text =
      answer.ok() ? absl::string_view(*answer) : answer.status().message();
  bytes.append(text.data(), text.size());
  return Frame(bytes);
}

bool HasFailed(const World& world) {
  auto* const comm =
      dynamic_cast<GroupCommunicator*>(world.communicator().get());
  return comm != nullptr && !comm->failure().ok();
}

absl::StatusOr<std::string> RunFunction(const World& world,
                                        const std::string& name,
                                        const std::string& args) {
  const auto function = Functions().find(name);
  if (function == Functions().end()) {
    return absl::NotFoundError(
        absl::StrCat("no TESSERA_RANK_FUNCTION(", name, ")"));
  }
  return CatchTorch(name, [&] { return function->second(world, args); });
}

// Serves until the pool closes its end.
void Serve(const World& world) {
  std::string in;
  while (true) {
    std::optional<std::string> request = TakeFrame(&in);
    if (!request.has_value()) {
      if (!ReadSome(kWorkerSocket, &in)) return;
      continue;
    }
    const std::string name = TakeFrame(&*request).value_or("");
    const std::string args = TakeFrame(&*request).value_or("");
    const auto answer = RunFunction(world, name, args);
    fflush(nullptr);
    if (!SendAll(kWorkerSocket, EncodeAnswer(answer, HasFailed(world)))) return;
  }
}

WorldOptions OptionsFromMark(const std::string& mark) {
  const std::vector<std::string> parts = absl::StrSplit(mark, ' ');
  WorldOptions options;
  options.startup_timeout = kStartTimeout;
  options.dump_folder = EnvString("TEST_TMPDIR").value_or("");
  if (parts.size() == 4) {
    absl::ParseDuration(parts[0], &options.collective_timeout);
    absl::ParseDuration(parts[1], &options.announce_grace);
    options.backend = parts[2];
    options.memory_group = parts[3];
  }
  return options;
}

}  // namespace

bool RegisterRankFunction(const char* name, RankFunction function) {
  if (!Functions().emplace(name, function).second) {
    fprintf(stderr, "two rank functions are called %s\n", name);
    abort();
  }
  return true;
}

void ServeIfRank(int* argc, char** argv) {
  ServeForks(kWorkerMark, argc, &argv);
  for (auto* function : StartFunctions()) function();
  const std::optional<std::string> mark = EnvString(kWorkerMark);
  if (!mark.has_value()) return;
  unsetenv(kWorkerMark);
  fcntl(kWorkerSocket, F_SETFD, FD_CLOEXEC);
  absl::StatusOr<const World*> world = Init(argc, argv, OptionsFromMark(*mark));
  const absl::StatusOr<std::string> hello =
      world.ok() ? absl::StatusOr<std::string>("") : world.status();
  if (SendAll(kWorkerSocket, EncodeAnswer(hello, !world.ok())) && world.ok()) {
    Serve(**world);
    Shutdown();
  }
  fflush(nullptr);
  _exit(0);
}

}  // namespace tessera
