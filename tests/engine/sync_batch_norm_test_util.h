// What the tests of SyncBatchNorm share.
#ifndef TESTS_ENGINE_SYNC_BATCH_NORM_TEST_UTIL_H_
#define TESTS_ENGINE_SYNC_BATCH_NORM_TEST_UTIL_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/bits.h"

namespace tessera {

inline std::string BitsOf(const at::Tensor& t) {
  const at::Tensor whole = t.detach().contiguous();
  return absl::StrCat(
      absl::Hex(Fingerprint(whole.const_data_ptr(),
                            static_cast<int64_t>(whole.nbytes()))),
      " ");
}

inline absl::Status Expect(bool holds, const std::string& what) {
  return holds ? absl::OkStatus() : absl::InternalError(what);
}

}  // namespace tessera
#endif  // TESTS_ENGINE_SYNC_BATCH_NORM_TEST_UTIL_H_
