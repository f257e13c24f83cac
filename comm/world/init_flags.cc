// What programs may know of Init's flags before Init reads them.
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "comm/launch/job.h"
#include "comm/world/world.h"

namespace tessera {

std::vector<InitFlag> InitFlags() {
  std::vector<InitFlag> flags;
  for (const JobFlagHelp& flag : AllJobFlags()) {
    flags.push_back({flag.name, flag.value, flag.text});
  }
  return flags;
}

absl::StatusOr<InitArguments> SplitInitFlags(int argc, char** argv) {
  InitArguments arguments;
  arguments.rest.assign(argv, argv + argc);
  arguments.rest.push_back(nullptr);  // TakeJobFlags ends with it
  TESSERA_ASSIGN_OR_RETURN(const JobFlags flags,
                           TakeJobFlags(&argc, arguments.rest.data()));
  arguments.rest.resize(static_cast<size_t>(argc));
  arguments.world = flags.world.value_or(0);
  arguments.plan_world = flags.plan_world.value_or(0);
  return arguments;
}

absl::StatusOr<std::vector<char*>> WithoutInitFlags(int argc, char** argv) {
  TESSERA_ASSIGN_OR_RETURN(InitArguments arguments, SplitInitFlags(argc, argv));
  return std::move(arguments.rest);
}

}  // namespace tessera
