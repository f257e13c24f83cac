#include "comm/nccl/nccl_group.h"

#include <chrono>
#include <cstdlib>
#include <new>
#include <utility>

#include "base/status.h"
#include "base/stream/cuda_library.h"
#include "base/torch_guard.h"

// The only file that sees c10d's NCCL header.
#include "torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp"

namespace tessera {
namespace {

using Group = c10d::ProcessGroupNCCL;
using Options = Group::Options;

// The constructors as libtorch 2.11 names them: all else is in their vtables.
constexpr char kNewOptions[] = "_ZN4c10d16ProcessGroupNCCL7OptionsC1Eb";
constexpr char kNewGroup[] =
    "_ZN4c10d16ProcessGroupNCCLC1EN3c1013intrusive_ptrINS_5StoreENS1_6detail34"
    "intrusive_target_default_null_typeIS3_EEEEiiNS2_INS0_7OptionsENS5_IS8_"
    "EEEE";

// Waits are ended by our own monitor; NCCL's timeout must never come first.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 365);

// `new T(arguments...)` by a constructor of that library.
template <typename T, typename... Arguments>
absl::StatusOr<c10::intrusive_ptr<T>> Construct(const char* constructor,
                                                Arguments... arguments) {
  static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
  TESSERA_ASSIGN_OR_RETURN(void* const found, TorchCudaSymbol(constructor));
  void* const memory = ::operator new(sizeof(T));
  try {
    reinterpret_cast<void (*)(void*, Arguments...)>(found)(
        memory, std::move(arguments)...);
  } catch (...) {
    ::operator delete(memory);
    throw;
  }
  return c10::intrusive_ptr<T>::unsafe_steal_from_new(static_cast<T*>(memory));
}

}  // namespace

absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> NewNcclGroup(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size) {
  // c10d's own watchdog ends the process when a collective fails; our monitor
  // returns a Status instead.
  setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/0);
  setenv("TORCH_NCCL_ENABLE_MONITORING", "0", /*overwrite=*/0);
  // The thread that gives a collective to the device must not wait for its end.
  setenv("TORCH_NCCL_BLOCKING_WAIT", "0", /*overwrite=*/1);
  return CatchTorch(
      "nccl", [&]() -> absl::StatusOr<c10::intrusive_ptr<c10d::Backend>> {
        TESSERA_ASSIGN_OR_RETURN(c10::intrusive_ptr<Options> options,
                                 Construct<Options>(kNewOptions, false));
        options->timeout = kNever;
        TESSERA_ASSIGN_OR_RETURN(
            c10::intrusive_ptr<Group> group,
            Construct<Group>(kNewGroup, store->clone(), rank, world_size,
                             std::move(options)));
        return group;
      });
}

}  // namespace tessera
