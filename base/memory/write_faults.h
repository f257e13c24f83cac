// WriteFaults says whose memory it was when an access through a raw pointer
// ends the program: a write into read-only memory (a shared working copy), or
// any access to pages that were taken away (sharding/construct/evictable.h).
//
// The first range installs a handler of SIGSEGV. It writes the message to the
// standard error and leaves the rest to the previous handler (or to the system,
// which ends the process). Faults elsewhere go to that handler at once. It
// knows addresses and messages only, not who owns the memory.
#ifndef BASE_MEMORY_WRITE_FAULTS_H_
#define BASE_MEMORY_WRITE_FAULTS_H_

#include <string>
#include <vector>

namespace tessera {

// Registers ranges of memory for as long as this lives. LOCAL; any thread.
class WriteFaults {
 public:
  struct Piece {
    const char* begin;
    const char* end;
    std::string message;  // a line without its end
  };
  // While one lives, a fault of this thread is reported as being in the
  // operator `name`; with null, in whichever it was before. Scopes nest; `name`
  // is borrowed.
  class Culprit {
   public:
    explicit Culprit(const char* name);
    ~Culprit();
    Culprit(const Culprit&) = delete;
    Culprit& operator=(const Culprit&) = delete;

   private:
    const char* const before_;
  };
  explicit WriteFaults(std::vector<Piece> pieces);
  ~WriteFaults();
  WriteFaults(const WriteFaults&) = delete;
  WriteFaults& operator=(const WriteFaults&) = delete;

 private:
  struct Table;
  Table* const table_;
};

}  // namespace tessera
#endif  // BASE_MEMORY_WRITE_FAULTS_H_
