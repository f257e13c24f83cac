// The job's secret, which its ranks know and strangers do not. No torch.
//
// The launcher of --world makes one for each job. Whoever starts ranks by hand,
// or by another launcher, may give all of them the same, of 16 characters at
// least, in TESSERA_JOB_SECRET, or in a file that is theirs alone (mode 0600),
// whose path is in TESSERA_JOB_SECRET_FILE. Two jobs with different secrets
// never take each other's ranks, though they were given one port.
//
// It is never sent: ranks prove to each other that they know it
// (comm/connect/handshake.h). Without one anybody who can reach the ports of
// the job may take part; of this host's own connections only this user's.
#ifndef COMM_CONNECT_JOB_SECRET_H_
#define COMM_CONNECT_JOB_SECRET_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

inline constexpr char kJobSecretVariable[] = "TESSERA_JOB_SECRET";
inline constexpr char kJobSecretFileVariable[] = "TESSERA_JOB_SECRET_FILE";

// Makes a secret: 64 hex digits that nobody can guess.
std::string NewJobSecret();

// Returns the environment's secret; "" if there is none. Errors:
//   InvalidArgument   both variables are set, or the secret is too short
//   Unavailable       the file cannot be read
//   PermissionDenied  the file is another user's, or open to other users
absl::StatusOr<std::string> FindJobSecret();

// Sets the secret of this process's job; call it before ranks meet. LOCAL.
void SetJobSecret(std::string secret);
bool HasJobSecret();

// Returns a key that only processes can compute that know the job's secret and
// `words`. Each purpose has its own key. LOCAL.
std::string JobKey(absl::string_view purpose, absl::string_view words);
// As JobKey, for a job of which this process is not a rank.
std::string KeyOfSecret(absl::string_view secret, absl::string_view purpose,
                        absl::string_view words);

}  // namespace tessera
#endif  // COMM_CONNECT_JOB_SECRET_H_
