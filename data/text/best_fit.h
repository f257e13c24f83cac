// Best-fit-decreasing bin packing of pieces of text, in O(n log L).
#ifndef DATA_TEXT_BEST_FIT_H_
#define DATA_TEXT_BEST_FIT_H_

#include <cstdint>
#include <vector>

namespace tessera {

// Some tokens of a corpus that stay together. One word, since there are as many
// as documents: 44 bits say where, 20 how many less one.
class TextPiece {
 public:
  static constexpr int64_t kMaxLength = int64_t{1} << 20;
  static constexpr int64_t kMaxBegin = (int64_t{1} << 44) - 1;

  // REQUIRES: 0 <= begin <= kMaxBegin, 1 <= length <= kMaxLength.
  TextPiece(int64_t begin, int64_t length)
      : word_(static_cast<uint64_t>(begin) << 20 |
              static_cast<uint64_t>(length - 1)) {}

  int64_t begin() const { return static_cast<int64_t>(word_ >> 20); }
  int64_t length() const {
    return static_cast<int64_t>(word_ & (kMaxLength - 1)) + 1;
  }

 private:
  uint64_t word_;
};

struct PackedPieces {
  std::vector<TextPiece> pieces;  // bin after bin
  // [bins + 1]: bin b has pieces [firsts[b], firsts[b + 1]).
  std::vector<uint32_t> firsts;
};

// Puts each piece into the bin with the least room that it fits into, or into a
// new one; the longest first, those of one length in the order given. Bins are
// numbered as they are opened, a bin's pieces stand in the order in which they
// came. So the result depends on `pieces` and `capacity` alone. Takes 20 bytes
// for each piece, of which 8 stay, and 4 for each bin stay.
// REQUIRES: lengths <= capacity <= TextPiece::kMaxLength, fewer than 2^32
// pieces.
PackedPieces PackBestFit(std::vector<TextPiece> pieces, int64_t capacity);

}  // namespace tessera
#endif  // DATA_TEXT_BEST_FIT_H_
