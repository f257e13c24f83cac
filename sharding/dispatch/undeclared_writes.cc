#include "sharding/dispatch/undeclared_writes.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"

namespace tessera {
namespace {

// By parameter.
std::vector<uint64_t> PrintsOf(const FlatParameter& flat) {
  TorchScope scope;
  std::vector<uint64_t> prints;
  for (const auto& p : flat.parameters()) {
    const at::Tensor host = p.tensor.detach().cpu();
    prints.push_back(Fingerprint(host.const_data_ptr(),
                                 static_cast<int64_t>(host.nbytes())));
  }
  return prints;
}

}  // namespace

void UndeclaredWrites::Watch(const std::shared_ptr<FlatParameter>& flat) {
  const bool known =
      std::any_of(watched_.begin(), watched_.end(),
                  [&](const Watched& w) { return w.flat == flat; });
  if (known) return;
  watched_.push_back({flat, flat->writes().prepared(), PrintsOf(*flat)});
}

void UndeclaredWrites::Check(const std::string& name) const {
  for (const Watched& w : watched_) {
    if (w.flat->writes().prepared() != w.writes) continue;
    const std::vector<uint64_t> now = PrintsOf(*w.flat);
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i] == w.prints[i]) continue;
      ThrowIfError(absl::FailedPreconditionError(absl::StrCat(
          "[", w.flat->name(), "] operator ", name, " wrote parameter '",
          w.flat->parameters()[i].name,
          "', and its schema does not say so: the write would be lost; say so "
          "(`Tensor(a!) w`), or write with an operator of libtorch's")));
    }
  }
}

}  // namespace tessera
