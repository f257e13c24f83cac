// Packs several strings into one, for a checkpoint's client_state: a loader's
// place beside what a program stores itself.
//
//   save   engine->SaveCheckpoint(
//              dir, PackClientState({{"loader", loader->State()},
//                                    {"program", mine}}));
//   load   TESSERA_ASSIGN_OR_RETURN(
//              ClientParts parts, UnpackClientState(report.client_state));
//          loader->Load(parts["loader"]);
#ifndef LOADER_CLIENT_STATE_H_
#define LOADER_CLIENT_STATE_H_

#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Parts by name. Names are one line; values are any bytes.
using ClientParts = std::map<std::string, std::string>;

// Returns "tessera-parts 2\nloader 57\n<57 bytes>\nprogram 3\n<3 bytes>\n".
std::string PackClientState(const ClientParts& parts);

// Returns the parts that PackClientState made `bytes` of. Returns DataLoss,
// naming the place, if it did not make them.
absl::StatusOr<ClientParts> UnpackClientState(absl::string_view bytes);
// Returns one part. Returns DataLoss as UnpackClientState does, and NotFound
// with the existing names.
absl::StatusOr<std::string> ClientPart(absl::string_view bytes,
                                       absl::string_view name);

}  // namespace tessera
#endif  // LOADER_CLIENT_STATE_H_
