// WriteFaults: says whose memory it was when an access through a raw pointer
// ends the program: a write into memory that is mapped to be read only (a
// shared working copy), or any access to pages that were taken away
// (sharding/construct/evictable.h).
//
// A handler of SIGSEGV, installed with the first range: it writes the message
// to the standard error and leaves the rest to the handler that was there
// before (or the system, which ends the process). Faults elsewhere go there at
// once. It knows addresses and messages only, nothing of who owns the memory.
#ifndef BASE_MEMORY_WRITE_FAULTS_H_
#define BASE_MEMORY_WRITE_FAULTS_H_

#include <string>
#include <vector>

namespace tessera {

// One range of memory, known as long as this lives. LOCAL; any thread.
class WriteFaults {
 public:
  struct Piece {
    const char* begin;
    const char* end;
    std::string message;  // a line without its end
  };
  // For its life a fault of this thread is said to be in the operator `name`;
  // null: of whatever it was. Nested; `name` is borrowed.
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
