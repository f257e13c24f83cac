// Fuzz targets are the parsers that read what other processes send; each gets
// arbitrary bytes.
//
//   FuzzTarget   one parser: what to run on an input, and well-formed inputs
//   FuzzInputs   the inputs of a test: those, and others made of them
//
// These targets are also programs for libFuzzer: see the BUILD file.
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
  // Parses the input. It ends with a result or an error, checks what it can of
  // the result, and never crashes. It keeps no memory, descriptors or threads.
  std::function<void(absl::string_view input)> run;
  std::vector<std::string> corpus;  // well-formed
  int rounds = 20000;               // number of generated inputs in a test
};

// Returns all targets of tests/fuzz/targets.cc.
std::vector<FuzzTarget> AllFuzzTargets();

// Generates inputs in an order that depends on `seed` alone: random bytes, and
// mutations of `corpus` with bits, bytes and numbers changed, pieces removed,
// doubled or moved from one into another, and ends cut off.
class FuzzInputs {
 public:
  // `corpus` is borrowed.
  FuzzInputs(const std::vector<std::string>& corpus, uint64_t seed)
      : corpus_(corpus), random_(seed) {}

  std::string Next();

 private:
  // Returns 0 to `below` - 1; 0 for 0.
  size_t Below(size_t below) { return below == 0 ? 0 : random_() % below; }
  std::string RandomBytes(size_t most);
  void ChangeOnce(std::string* input);
  void ChangeNumber(std::string* input);
  void MovePiece(std::string* input);

  const std::vector<std::string>& corpus_;
  std::mt19937_64 random_;
};

// Returns the bytes of a plain struct, for a corpus.
template <typename T>
std::string BytesOf(const T& value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof(value));
}

// Writes `input` to a socket whose other end is `fd`, in pieces whose lengths
// depend on its own bytes, and closes it. `open` is called first and takes
// `fd`. `read` is called after each piece, and once at the end; it returns
// whether to continue.
void FeedSocket(absl::string_view input,
                const std::function<void(int fd)>& open,
                const std::function<bool()>& read);

}  // namespace tessera
#endif  // TESTS_FUZZ_FUZZ_H_
