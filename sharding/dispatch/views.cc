// Views of tagged tensors: libtorch's own operators that always make a view
// pass the tag by. There is nothing to pin, and the result is tagged already,
// since it gets its source's keys. (Those that may copy instead, such as
// reshape, go to the fallback like any other:
// sharding/dispatch/operator_info.h.)
#include <string>

#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/torch/torch_scope.h"
#include "torch/library.h"

namespace tessera {
namespace {

TORCH_LIBRARY_IMPL(aten, DeferredInit, m) {
  static_assert(kTagKey == c10::DispatchKey::DeferredInit);
  for (const absl::string_view name : absl::StrSplit(
           "alias,as_strided,chunk,detach,expand,narrow,permute,select.int,"
           "slice.Tensor,split.Tensor,split_with_sizes,squeeze.dim,t,"
           "transpose.int,unbind.int,unsqueeze,view",
           ',')) {
    m.impl(std::string(name).c_str(), torch::CppFunction::makeFallthrough());
  }
}

}  // namespace
}  // namespace tessera
