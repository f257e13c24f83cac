// Makes libtorch pin memory for CUDA faster.
//
// By default each allocation is one cudaHostAlloc, in which one thread of the
// driver makes the pages. With these settings libtorch allocates plain memory,
// touches its pages with several threads and registers it (cudaHostRegister).
//
// Source: libtorch 2.11, c10/cuda/CUDAAllocatorConfig.h.
#ifndef OFFLOAD_PINNED_SETTINGS_H_
#define OFFLOAD_PINNED_SETTINGS_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// Returns what to set libtorch's allocator settings to, where they are `now`
// and the process may use so many processors; "" if they are to stay, since
// whoever set them has chosen how memory is pinned. Setting them resets what is
// left out, so all of `now` is in the result.
std::string PinnedSettings(absl::string_view now, int processors);

// Changes this process's settings so, if it has CUDA; otherwise, and where
// libtorch refuses them, does nothing. Call it before memory is pinned. LOCAL.
void SetPinnedSettings();

}  // namespace tessera
#endif  // OFFLOAD_PINNED_SETTINGS_H_
