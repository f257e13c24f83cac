// The file of a file:// rendezvous. What lets a process into the job stands in
// it, so it must be its user's alone. libtorch's store makes such files
// readable for all, and takes whatever is there; so ours comes before. No
// torch.
#ifndef COMM_RENDEZVOUS_STORE_FILE_H_
#define COMM_RENDEZVOUS_STORE_FILE_H_

#include <string>

#include "absl/status/status.h"

namespace tessera {

// Makes the file at `path`, with mode 0600, unless another rank has. Others can
// still put theirs in its place if they may rename files in the folder. LOCAL.
// Returns
//   Unavailable       the folder cannot be written to, or the file not be made
//   PermissionDenied  what is there is no plain file, or another user's, or
//                     open to other users
absl::Status ClaimStoreFile(const std::string& path);

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_STORE_FILE_H_
