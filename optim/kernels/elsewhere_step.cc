#include <emmintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "optim/kernels/block8.h"
#include "optim/kernels/element_step.h"

namespace tessera {
namespace {

constexpr size_t kLine = 64;  // bytes that memory is written by
// Elements that are stepped in a Room, which the first-level cache holds.
constexpr int64_t kPiece = 8 * kBlock8Elements;

void WritePastCaches(const char* from, size_t bytes, char* to) {
  const size_t lead = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kLine);
  std::memcpy(to, from, lead);
  size_t i = lead;
  for (; i + kLine <= bytes; i += kLine) {
    const auto* const line = reinterpret_cast<const __m128i*>(from + i);
    auto* const written = reinterpret_cast<__m128i*>(to + i);
    for (int part = 0; part < 4; ++part) {
      _mm_stream_si128(written + part, _mm_loadu_si128(line + part));
    }
  }
  std::memcpy(to + i, from + i, bytes - i);
}

// Memory that elements are stepped in before they are written.
class Room {
 public:
  // If `*place` goes to `to`, makes it memory of the room, with its bytes.
  void Bring(void** place, void* to, int64_t bytes, bool read = true) {
    if (to == nullptr) return;
    char* const here = memory_[count_];
    const auto size = static_cast<size_t>(bytes);
    if (read) std::memcpy(here, *place, size);
    *place = here;
    leaving_[count_++] = {here, size, static_cast<char*>(to)};
  }
  void Send() {
    for (int i = 0; i < count_; ++i) {
      WritePastCaches(leaving_[i].from, leaving_[i].bytes, leaving_[i].to);
    }
    count_ = 0;
  }

 private:
  static constexpr int kPlaces = kMaxStates + 3;
  struct Leaving {
    const char* from;
    size_t bytes;
    char* to;
  };
  alignas(kLine) char memory_[kPlaces][kPiece * sizeof(double)];
  Leaving leaving_[kPlaces];
  int count_ = 0;
};

}  // namespace

void StepElementsTo(Formula formula, const StepRange& range,
                    const StepRange& to, const StepCoefficients& coefficients,
                    Isa isa) {
  Room room;
  for (int64_t begin = 0, end; begin < range.numel; begin = end) {
    end = std::min(begin + kPiece, range.numel);
    StepRange piece = Part(range, begin, end);
    const StepRange out = Part(to, begin, end);
    const auto bytes = [&](NumberType type) {
      return BytesOf(type, end - begin);
    };
    room.Bring(&piece.master, out.master, bytes(range.master_type));
    for (int s = 0; s < kMaxStates; ++s) {
      room.Bring(&piece.states[s], out.states[s], bytes(range.state_type));
    }
    room.Bring(&piece.average, out.average,
               bytes(AverageType(range.master_type)));
    // Of masters in two halves it is read, too.
    room.Bring(&piece.working, out.working, bytes(range.working_type),
               range.master_type == NumberType::kRemainder);
    StepElements(formula, piece, coefficients, isa);
    room.Send();
  }
  _mm_sfence();
}

}  // namespace tessera
