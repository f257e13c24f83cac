#include "tests/fuzz/targets.h"

#include <vector>

namespace tessera {

std::vector<FuzzTarget> AllFuzzTargets() {
  return {EndpointTarget(),        HandshakeTarget(),
          LivenessTarget(),        StoreTarget(),
          ShardAnswersTarget(),    ShardRequestsTarget(),
          TextRecordTarget(),      PackedTextsTarget(),
          DescriptorsTarget(),     CheckpointManifestTarget(),
          CheckpointIndexTarget(), CheckpointDataTarget()};
}

}  // namespace tessera
