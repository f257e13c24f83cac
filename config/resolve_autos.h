// Replaces "auto" by what the program knows (config/auto_values.h).
#ifndef CONFIG_RESOLVE_AUTOS_H_
#define CONFIG_RESOLVE_AUTOS_H_

#include "config/auto_values.h"
#include "config/reader/faults.h"
#include "config/reader/proto_reader.h"

namespace tessera {

namespace proto {
class Config;
}

// Resolves the fields that `record` lists as written "auto". REQUIRES: config
// is not completed yet.
void ResolveAutos(const ReadRecord& record, const AutoValues& values,
                  int world_size, proto::Config* config, Faults* faults);

}  // namespace tessera
#endif  // CONFIG_RESOLVE_AUTOS_H_
