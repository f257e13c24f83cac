#include "tests/fuzz/targets.h"

#include <vector>

namespace tessera {

std::vector<FuzzTarget> AllFuzzTargets() {
  return {ShardAnswersTarget(), ShardRequestsTarget(), TextRecordTarget(),
          PackedTextsTarget(), DescriptorsTarget()};
}

}  // namespace tessera
