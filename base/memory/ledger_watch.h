// Who is told of what happens to MemoryLedger::Global().
//
// Threads: any may be told; SetLedgerWatch once, by any.
#ifndef BASE_MEMORY_LEDGER_WATCH_H_
#define BASE_MEMORY_LEDGER_WATCH_H_

#include <cstdint>

namespace tessera {

class LedgerWatch {
 public:
  // The ledger has become `change` bytes larger, or smaller. The thread may
  // hold any lock: must be short, and allocate nothing that is counted.
  virtual void Changed(int64_t change) = 0;
  // AllocateCounted has refused a buffer; nothing has been freed since.
  virtual void Refused() = 0;

 protected:
  ~LedgerWatch() = default;
};

// For all changes to come; lives to the end of the process.
void SetLedgerWatch(LedgerWatch* watch);

}  // namespace tessera
#endif  // BASE_MEMORY_LEDGER_WATCH_H_
