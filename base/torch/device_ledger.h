// Finds the ledger that counts the memory of a libtorch device.
#ifndef BASE_TORCH_DEVICE_LEDGER_H_
#define BASE_TORCH_DEVICE_LEDGER_H_

#include "ATen/core/Tensor.h"
#include "base/memory/ledger.h"

namespace tessera {

// `device` has an index, as that of a tensor has, unless it is the CPU.
inline MemoryLedger& LedgerOf(at::Device device) {
  return device.is_cpu() ? MemoryLedger::Host()
                         : MemoryLedger::Of(device.str());
}

}  // namespace tessera
#endif  // BASE_TORCH_DEVICE_LEDGER_H_
