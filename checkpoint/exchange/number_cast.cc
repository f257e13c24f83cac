#include "checkpoint/exchange/number_cast.h"

#include <cmath>
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

// Truncates and, if that is not exact, sets the last bit: the result rounds to
// fewer bits as `value` itself does.
float RoundToOdd(double value) {
  const auto nearest = static_cast<float>(value);
  if (nearest == value || value != value) return nearest;
  auto bits = As<uint32_t>(reinterpret_cast<const char*>(&nearest));
  if (std::abs(nearest) > std::abs(value)) --bits;
  return FromBits(bits | 1);
}

// Appends what `convert` makes of each number, one every `step` bytes.
template <typename Convert>
void AppendEach(const char* from, int64_t n, int64_t step, std::string* out,
                const Convert& convert) {
  using To = decltype(convert(from));
  size_t at = out->size();
  out->resize(at + static_cast<size_t>(n) * sizeof(To));
  for (int64_t i = 0; i < n; ++i, at += sizeof(To)) {
    const To number = convert(from + i * step);
    std::memcpy(&(*out)[at], &number, sizeof(number));
  }
}

}  // namespace

bool NumberCast::IsFloat(const std::string& dtype) {
  return dtype == "F32" || dtype == "BF16" || dtype == "F16" || dtype == "F64";
}

NumberCast::NumberCast(const std::string& from, const std::string& to)
    : from_(from),
      to_(to),
      from_bytes_(DtypeBytes(from)),
      to_bytes_(DtypeBytes(to)) {}

void NumberCast::Append(const char* from, int64_t n, int64_t stride,
                        std::string* out) const {
  const int64_t step = stride * from_bytes_;
  const auto each = [&](const auto& convert) {
    AppendEach(from, n, step, out, convert);
  };
  if (same()) {
    if (stride == 1)
      out->append(from, static_cast<size_t>(n * from_bytes_));
    else if (from_bytes_ == 1)
      each(As<uint8_t>);
    else if (from_bytes_ == 2)
      each(As<uint16_t>);
    else if (from_bytes_ == 4)
      each(As<uint32_t>);
    else
      each(As<uint64_t>);
    return;
  }
  const bool wide = to_ == "F32";
  const auto cast = [&](const auto& read) {
    if (wide) return each(read);
    each([&](const char* at) { return ToBfloat16(read(at)); });
  };
  if (from_ == "F32") {
    cast(As<float>);
  } else if (from_ == "BF16") {
    cast([](const char* at) {
      return FromBits(uint32_t{As<uint16_t>(at)} << 16);
    });
  } else if (from_ == "F16") {
    cast([](const char* at) { return FromHalf(As<uint16_t>(at)); });
  } else if (wide) {
    each([](const char* at) { return static_cast<float>(As<double>(at)); });
  } else {
    cast([](const char* at) { return RoundToOdd(As<double>(at)); });
  }
}

}  // namespace tessera
