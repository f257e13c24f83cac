// OpenSwap: opens a new file without a name in a folder, and removes leftovers
// of others.
//
// A file has the name tessera-swap-XXXXXX from its creation until it is
// unlinked, some microseconds. A file that is older than a minute and not
// locked is removed by whoever finds it: its job was killed in between.
//
// Threads: any.
#ifndef OFFLOAD_DISK_SWAP_FOLDER_H_
#define OFFLOAD_DISK_SWAP_FOLDER_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/disk/file_system.h"

namespace tessera {

struct OpenedSwap {
  int fd = -1;          // the caller closes it
  bool direct = false;  // O_DIRECT
};

// Errors name the folder, and begin with `owner`. LOCAL.
absl::StatusOr<OpenedSwap> OpenSwap(FileSystem* files,
                                    const std::string& folder,
                                    absl::string_view owner);

}  // namespace tessera
#endif  // OFFLOAD_DISK_SWAP_FOLDER_H_
