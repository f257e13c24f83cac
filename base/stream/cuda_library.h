// Loads libtorch's CUDA library where there is a driver.
//
// Programs are not linked to it: it takes each rank a quarter of a second of a
// processor to load, and is of no use without a GPU. A program that depends on
// this target has it before main() if CUDA's driver is on the machine: libtorch
// asks only once which devices have registered themselves.
#ifndef BASE_STREAM_CUDA_LIBRARY_H_
#define BASE_STREAM_CUDA_LIBRARY_H_

#include "absl/status/statusor.h"

namespace tessera {

// Returns the address of a symbol of that library by its name in there, and
// loads the library first if there was no driver. Returns FailedPrecondition
// where the library, or what it needs, is missing, and NotFound without such a
// symbol. LOCAL, thread-safe.
absl::StatusOr<void*> TorchCudaSymbol(const char* name);

}  // namespace tessera
#endif  // BASE_STREAM_CUDA_LIBRARY_H_
