// libFuzzer runs this: the target that the BUILD file names.
#include <cstddef>
#include <cstdint>

#include "absl/strings/string_view.h"
#include "base/check.h"
#include "tests/fuzz/fuzz.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const tessera::FuzzTarget* const target = [] {
    for (const tessera::FuzzTarget& each : tessera::AllFuzzTargets()) {
      if (each.name == TESSERA_FUZZ_TARGET) {
        return new tessera::FuzzTarget(each);
      }
    }
    TESSERA_CHECK(false) << "there is no target " << TESSERA_FUZZ_TARGET;
    return static_cast<tessera::FuzzTarget*>(nullptr);
  }();
  target->run(absl::string_view(reinterpret_cast<const char*>(data), size));
  return 0;
}
