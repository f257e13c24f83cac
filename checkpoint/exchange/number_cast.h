// NumberCast: numbers of one of a checkpoint's dtypes as those of another. No
// torch.
#ifndef CHECKPOINT_EXCHANGE_NUMBER_CAST_H_
#define CHECKPOINT_EXCHANGE_NUMBER_CAST_H_

#include <cstdint>
#include <string>

namespace tessera {

class NumberCast {
 public:
  // F32, BF16, F16 or F64, which can be cast to F32 and BF16 (rounded to
  // nearest, ties to even).
  static bool IsFloat(const std::string& dtype);

  // REQUIRES: the two are the same, or can be cast.
  NumberCast(const std::string& from, const std::string& to);

  bool same() const { return from_ == to_; }
  int64_t from_bytes() const { return from_bytes_; }
  // The number at `from`.
  void Append(const char* from, std::string* out) const;

 private:
  float Read(const char* from) const;

  const std::string from_, to_;
  const int64_t from_bytes_;
};

}  // namespace tessera
#endif  // CHECKPOINT_EXCHANGE_NUMBER_CAST_H_
