#include "base/stream/cuda_library.h"

#include <dlfcn.h>
#include <link.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace tessera {
namespace {

// Opens the one beside the libtorch that this program has.
absl::StatusOr<void*> Open() {
  void* const libtorch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  const link_map* map = nullptr;
  void* library = nullptr;
  if (libtorch != nullptr && dlinfo(libtorch, RTLD_DI_LINKMAP, &map) == 0) {
    std::string path = map->l_name;
    path.replace(path.rfind('/') + 1, std::string::npos, "libtorch_cuda.so");
    library = dlopen(path.c_str(), RTLD_LAZY | RTLD_GLOBAL);
  }
  if (library == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("libtorch's CUDA library does not load: ", dlerror()));
  }
  return library;
}

// An error comes again from TorchCudaSymbol.
[[maybe_unused]] const bool opened_at_start =
    dlopen("libcuda.so.1", RTLD_LAZY) != nullptr && Open().ok();

}  // namespace

absl::StatusOr<void*> TorchCudaSymbol(const char* name) {
  TESSERA_ASSIGN_OR_RETURN(void* library, Open());
  void* const symbol = dlsym(library, name);
  if (symbol == nullptr) {
    return absl::NotFoundError(absl::StrCat(
        "libtorch's CUDA library is not that of 2.11: ", dlerror()));
  }
  return symbol;
}

}  // namespace tessera
