// Packs pieces of text into bins by best fit decreasing, in O(n log L).
#ifndef DATA_TEXT_BEST_FIT_H_
#define DATA_TEXT_BEST_FIT_H_

#include <cstdint>
#include <vector>

namespace tessera {

// TextPiece is some tokens of a corpus that stay together. It is one word,
// since there are as many pieces as documents: 44 bits for the begin, 20 for
// the length less one.
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

// Puts each piece into the fullest bin that has room for it, or into a new one;
// the longest piece first, pieces of one length in the given order. Bins are
// numbered as they are opened, and a bin's pieces are in the order in which
// they came, so the result depends on `pieces` and `capacity` alone. Takes 20
// bytes for each piece, 8 of which stay, and 4 for each bin, which stay.
// REQUIRES: lengths <= capacity <= TextPiece::kMaxLength, fewer than 2^32
// pieces.
PackedPieces PackBestFit(std::vector<TextPiece> pieces, int64_t capacity);

}  // namespace tessera
#endif  // DATA_TEXT_BEST_FIT_H_
