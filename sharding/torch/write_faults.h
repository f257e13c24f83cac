// WriteFaults: says whose memory it was when a write through a raw pointer into
// a shared working copy, which is mapped to be read only, ends the program.
//
// A handler of SIGSEGV, installed with the first range: it writes the message
// to the standard error and leaves the rest to the handler that was there
// before (or the system, which ends the process). Faults elsewhere go there at
// once.
#ifndef SHARDING_TORCH_WRITE_FAULTS_H_
#define SHARDING_TORCH_WRITE_FAULTS_H_

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
  explicit WriteFaults(std::vector<Piece> pieces);
  ~WriteFaults();
  WriteFaults(const WriteFaults&) = delete;
  WriteFaults& operator=(const WriteFaults&) = delete;

 private:
  struct Table;
  Table* const table_;
};

}  // namespace tessera
#endif  // SHARDING_TORCH_WRITE_FAULTS_H_
