// NumberCast converts numbers of one of a checkpoint's dtypes to another. No
// torch.
#ifndef CHECKPOINT_EXCHANGE_NUMBER_CAST_H_
#define CHECKPOINT_EXCHANGE_NUMBER_CAST_H_

#include <cstdint>
#include <string>

namespace tessera {

class NumberCast {
 public:
  // Returns whether it is F32, BF16, F16 or F64, which can be cast to F32 and
  // BF16 (rounded once, to nearest, ties to even).
  static bool IsFloat(const std::string& dtype);

  // REQUIRES: the two are equal, or can be cast.
  NumberCast(const std::string& from, const std::string& to);

  bool same() const { return from_ == to_; }
  int64_t from_bytes() const { return from_bytes_; }  // of a number
  int64_t to_bytes() const { return to_bytes_; }
  // Appends `n` numbers, the first at `from`, each `stride` numbers after the
  // one before.
  void Append(const char* from, int64_t n, int64_t stride,
              std::string* out) const;

 private:
  const std::string from_, to_;
  const int64_t from_bytes_, to_bytes_;
};

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_NUMBER_CAST_H_
