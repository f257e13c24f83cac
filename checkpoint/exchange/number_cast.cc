#include "checkpoint/exchange/number_cast.h"

#include <cstring>

#include "checkpoint/format/manifest.h"

namespace tessera {
namespace {

template <typename T>
T As(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

float FromBits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

float FromHalf(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = half >> 10 & 31, mantissa = half & 1023;
  if (exponent == 31) return FromBits(sign | 0x7f800000 | mantissa << 13);
  if (exponent > 0) {
    return FromBits(sign | (exponent + 112) << 23 | mantissa << 13);
  }
  const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
  return sign != 0 ? -tiny : tiny;
}

uint16_t ToBfloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace

bool NumberCast::IsFloat(const std::string& dtype) {
  return dtype == "F32" || dtype == "BF16" || dtype == "F16" || dtype == "F64";
}

NumberCast::NumberCast(const std::string& from, const std::string& to)
    : from_(from), to_(to), from_bytes_(DtypeBytes(from)) {}

void NumberCast::Append(const char* from, std::string* out) const {
  if (same()) {
    out->append(from, static_cast<size_t>(from_bytes_));
    return;
  }
  const float value = Read(from);
  if (to_ == "F32") {
    out->append(reinterpret_cast<const char*>(&value), sizeof(value));
  } else {
    const uint16_t half = ToBfloat16(value);
    out->append(reinterpret_cast<const char*>(&half), sizeof(half));
  }
}

float NumberCast::Read(const char* from) const {
  if (from_ == "F32") return As<float>(from);
  if (from_ == "BF16") return FromBits(uint32_t{As<uint16_t>(from)} << 16);
  if (from_ == "F16") return FromHalf(As<uint16_t>(from));
  return static_cast<float>(As<double>(from));
}

}  // namespace tessera
