// LedgerWatch is notified of changes of the ledgers of the host and of devices.
//
// Threads: any thread may notify it; SetLedgerWatch is called once, by any
// thread.
#ifndef BASE_MEMORY_LEDGER_WATCH_H_
#define BASE_MEMORY_LEDGER_WATCH_H_

#include <cstdint>

namespace tessera {

class MemoryLedger;  // base/memory/ledger.h

class LedgerWatch {
 public:
  // `ledger` has grown by `change` bytes, or shrunk if it is negative. The
  // calling thread may hold any lock: the callee must be short and allocate
  // nothing that is counted.
  virtual void Changed(const MemoryLedger& ledger, int64_t change) = 0;
  // Memory that `ledger` counts was refused; nothing has been freed since.
  virtual void Refused(const MemoryLedger& ledger) = 0;

 protected:
  ~LedgerWatch() = default;
};

// Registers the watch for all later changes; it lives to the end of the
// process.
void SetLedgerWatch(LedgerWatch* watch);

}  // namespace tessera
#endif  // BASE_MEMORY_LEDGER_WATCH_H_
