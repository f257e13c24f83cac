// Fuzz targets: the parsers that read what other processes send, each with any
// bytes at all.
//
//   FuzzTarget   one parser: what to run on an input, and well-formed inputs
//   FuzzInputs   the inputs of a test: those, and others made of them
//
// The same targets are programs for libFuzzer: see the BUILD file.
#ifndef TESTS_FUZZ_FUZZ_H_
#define TESTS_FUZZ_FUZZ_H_

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace tessera {

struct FuzzTarget {
  std::string name;  // as in the BUILD file
  // Ends with a result or an error, and checks what it can of it; never with a
  // crash. Keeps nothing: no memory, no descriptors, no threads.
  std::function<void(absl::string_view input)> run;
  std::vector<std::string> corpus;  // well-formed
  int rounds = 20000;               // of a test: inputs that are made
};

// tests/fuzz/targets.cc has them all.
std::vector<FuzzTarget> AllFuzzTargets();

// Inputs in an order that `seed` alone decides: random bytes, and those of
// `corpus` with bits, bytes and numbers changed, pieces cut out, doubled, moved
// from one into another, and ends cut off.
class FuzzInputs {
 public:
  // `corpus` is borrowed.
  FuzzInputs(const std::vector<std::string>& corpus, uint64_t seed)
      : corpus_(corpus), random_(seed) {}

  std::string Next();

 private:
  // 0 to `below` - 1; 0 for 0.
  size_t Below(size_t below) { return below == 0 ? 0 : random_() % below; }
  std::string RandomBytes(size_t most);
  void ChangeOnce(std::string* input);
  void ChangeNumber(std::string* input);
  void MovePiece(std::string* input);

  const std::vector<std::string>& corpus_;
  std::mt19937_64 random_;
};

// The bytes of a plain struct, as a corpus has them.
template <typename T>
std::string BytesOf(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Writes `input` to a socket whose other end is `fd`, in pieces whose lengths
// its own bytes decide, and closes it; `read` is called after each piece, and
// once the end has come, and says whether it goes on. `fd` is taken by
// `open`, which is called first.
void FeedSocket(absl::string_view input,
                const std::function<void(int fd)>& open,
                const std::function<bool()>& read);

}  // namespace tessera
#endif  // TESTS_FUZZ_FUZZ_H_
