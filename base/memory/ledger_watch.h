// Who is told of what happens to the ledgers of the host and of devices.
//
// Threads: any may be told; SetLedgerWatch once, by any.
#ifndef BASE_MEMORY_LEDGER_WATCH_H_
#define BASE_MEMORY_LEDGER_WATCH_H_

#include <cstdint>

namespace tessera {

class MemoryLedger;  // base/memory/ledger.h

class LedgerWatch {
 public:
  // `ledger` has become `change` bytes larger, or smaller. The thread may hold
  // any lock: must be short, and allocate nothing that is counted.
  virtual void Changed(const MemoryLedger& ledger, int64_t change) = 0;
  // Memory that `ledger` counts was refused; nothing has been freed since.
  virtual void Refused(const MemoryLedger& ledger) = 0;

 protected:
  ~LedgerWatch() = default;
};

// For all changes to come; lives to the end of the process.
void SetLedgerWatch(LedgerWatch* watch);

}  // namespace tessera
#endif  // BASE_MEMORY_LEDGER_WATCH_H_
