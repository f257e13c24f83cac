// Converts tiles of 64 elements between memory and float32. Only step_loops.cc
// includes it, as vectors.h.
#ifndef OPTIM_KERNELS_TILES_H_
#define OPTIM_KERNELS_TILES_H_

#include <cstdint>

#include "optim/kernels/element_step.h"
#include "optim/kernels/vectors.h"
#include "optim/kernels/wide.h"

namespace tessera::TESSERA_STEP_ISA {
namespace {

constexpr int kTile = kBlock8Elements;

inline int64_t ItemBytes(NumberType type) {
  return type == NumberType::kNone ? 0 : type == NumberType::kFloat32 ? 4 : 2;
}

// Not inlined: the loop of a tile is slower beside them.
__attribute__((noinline)) void From16(const void* from, NumberType type,
                                      float* to) {
  const auto* const halves = static_cast<const uint16_t*>(from);
  for (int i = 0; i < kTile; i += kLanes) {
    const auto x = LoadAs<Halves>(halves + i);
    Store(type == NumberType::kBFloat16 ? FromBFloat16(x) : FromFloat16(x),
          to + i);
  }
}

// Writes a vector, kPast: past the caches, to memory aligned to 64 bytes.
template <bool kPast, typename V>
inline void Put(const V& v, void* to) {
  if constexpr (kPast) {
    __builtin_nontemporal_store(v, static_cast<V*>(to));
  } else {
    Store(v, to);
  }
}
template <bool kPast>
inline void PutWide(const Wide& x, float* to) {
  for (int v = 0; v < kWide; ++v) Put<kPast>(x.v[v].x, to + v * kLanes);
}

template <bool kPast>
__attribute__((noinline)) void ToWorking(const float* from, NumberType type,
                                         void* to) {
  if (type == NumberType::kFloat32) {
    for (int i = 0; i < kTile; i += kLanes) {
      Put<kPast>(LoadAs<Floats>(from + i), static_cast<float*>(to) + i);
    }
    return;
  }
  for (int i = 0; i < kTile; i += 2 * kLanes) {
    const auto a = LoadAs<Floats>(from + i),
               b = LoadAs<Floats>(from + i + kLanes);
    uint16_t* const at = static_cast<uint16_t*>(to) + i;
    if (type == NumberType::kBFloat16) {
      Put<kPast>(ToBFloat16(a, b), at);
    } else {
      Put<kPast>(ToFloat16(a), at);
      Put<kPast>(ToFloat16(b), at + kLanes);
    }
  }
}

// From the nearer end would be no other here: weights are small, or 1.
__attribute__((noinline)) void AverageTile(const float* master, Vector weight,
                                           float* average) {
  for (int i = 0; i < kTile; i += kLanes) {
    const Vector a = {LoadAs<Floats>(average + i)};
    const Vector m = {LoadAs<Floats>(master + i)};
    Store(OneNan(MultiplyAdd(weight, m - a, a)).x, average + i);
  }
}

// Masters of 16 bits; `number`: of the first one.
__attribute__((noinline)) void ToMasters(const float* from, int64_t number,
                                         uint64_t seed, NumberType type,
                                         uint16_t* to) {
  RandomBits random(static_cast<uint64_t>(number), seed);
  for (int i = 0; i < kTile; i += 2 * kLanes) {
    const Vector a = {LoadAs<Floats>(from + i)},
                 b = {LoadAs<Floats>(from + i + kLanes)};
    const Words up = random.Next(), next = random.Next();
    if (type == NumberType::kBFloat16) {
      Store(UpperHalves(RandomlyUp<0>(a, up), RandomlyUp<0>(b, next)), to + i);
    } else {
      Store(RandomlyToFloat16(a.x, up), to + i);
      Store(RandomlyToFloat16(b.x, next), to + i + kLanes);
    }
  }
}

// Masters in two halves, as offload/remainders.h has them.
__attribute__((noinline)) void Join(const uint16_t* working,
                                    const uint16_t* remainders, float* to) {
  for (int i = 0; i < kTile; i += kLanes) {
    const Words upper =
        __builtin_convertvector(LoadAs<Halves>(working + i), Words) << 16;
    const Ints lower =
        __builtin_convertvector(LoadAs<Shorts>(remainders + i), Ints);
    Store(upper + reinterpret_cast<Words>(lower), to + i);
  }
}
// A NaN is 0x7fc00000.
__attribute__((noinline)) void Split(const float* from, uint16_t* working,
                                     uint16_t* remainders) {
  for (int i = 0; i < kTile; i += 2 * kLanes) {
    const auto a = LoadAs<Words>(from + i),
               b = LoadAs<Words>(from + i + kLanes);
    Store(UpperHalves(a + 0x8000, b + 0x8000), working + i);
    Store(LowerHalves(a, b), remainders + i);
  }
}

// ---- block8.h

// Cuts elements, which are words, to codes. `largest` is the largest of their
// magnitudes and kBlock8LeastScale.
template <bool kNonNegative>
inline void ToBlock8(const float* from, uint32_t largest, char* to) {
  uint32_t scale = largest & 0x7f800000;
  const bool finite = scale < 0x7f800000;
  if (!finite) scale = 0x7fc00000;
  __builtin_memcpy(to + kTile, &scale, sizeof(scale));
  if (__builtin_expect(!finite, false)) {
    __builtin_memset(to, kCodeOfOne<kNonNegative>, kTile);
    return;
  }
  for (int i = 0; i < kTile; i += kWide * kLanes) {
    const auto x = LoadAs<Wide>(from + i);
    Store(ToCodes<kNonNegative>(x.v, static_cast<uint16_t>(scale >> 16)),
          to + i);
  }
}

// ---- a state of tiles, kWide vectors at a time
//
// For each tile Begin(from, to), which may be the same; Load(i) and Save(i, x,
// random), of the elements from i on, for all i; End(). kPast: see Put.

struct Float32State {
  void Begin(char* from, char* to) {
    memory = from;
    written = to;
  }
  template <bool kNonNegative>
  Wide Load(int i) const {
    return LoadAs<Wide>(memory + 4 * i);
  }
  template <int kState, bool kPast>
  void Save(int i, const Wide& x, const Words*) {
    PutWide<kPast>(OneNan(x), reinterpret_cast<float*>(written) + i);
  }
  template <bool kNonNegative>
  void End() const {}

  static constexpr bool kRandom = false;
  char *memory, *written;
};

struct BFloat16State {
  void Begin(char* from, char* to) {
    memory = from;
    written = to;
  }
  template <bool kNonNegative>
  Wide Load(int i) const {
    Wide x;
    for (int v = 0; v < kWide; ++v) {
      x.v[v] = {FromBFloat16(LoadAs<Halves>(memory + 2 * (i + v * kLanes)))};
    }
    return x;
  }
  template <int kState, bool kPast>
  void Save(int i, const Wide& x, const Words* random) {
    for (int v = 0; v < kWide; v += 2) {
      Put<kPast>(
          UpperHalves(RandomlyUp<kState>(OneNan(x.v[v]), random[v]),
                      RandomlyUp<kState>(OneNan(x.v[v + 1]), random[v + 1])),
          written + 2 * (i + v * kLanes));
    }
  }
  template <bool kNonNegative>
  void End() const {}

  static constexpr bool kRandom = true;
  char *memory, *written;
};

// A tile is encoded at its end: the largest magnitude is known last.
struct Block8State {
  void Begin(char* of_tile, char* /*the same*/) {
    block = of_tile;
    most = Words{} + kBlock8LeastScale;
  }
  template <bool kNonNegative>
  Wide Load(int i) const {
    Wide x;
    const auto scale = LoadAs<uint16_t>(block + kTile + 2);  // its upper half
    FromCodes<kNonNegative>(LoadAs<Bytes4>(block + i), scale, x.v);
    return x;
  }
  template <int kState, bool /*kPast*/>
  void Save(int i, const Wide& x, const Words* random) {
    for (int v = 0; v < kWide; ++v) {
      const Words word = RandomlyUpToCode<kState>(x.v[v], random[v]);
      most = __builtin_elementwise_max(most, word & 0x7fffffff);
      Store(word, elements + i + v * kLanes);
    }
  }
  template <bool kNonNegative>
  void End() const {
    ToBlock8<kNonNegative>(elements, __builtin_reduce_max(most), block);
  }

  static constexpr bool kRandom = true;
  char* block;
  Words most;
  alignas(64) float elements[kTile];
};

// A tile from and to memory of a state's type.
template <typename State, bool kNonNegative>
inline void LoadTile(const char* memory, float* to) {
  State state;
  state.Begin(const_cast<char*>(memory), nullptr);
  for (int i = 0; i < kTile; i += kWide * kLanes) {
    Store(state.template Load<kNonNegative>(i), to + i);
  }
}
template <typename State, bool kNonNegative, int kState>
inline void SaveTile(const float* from, int64_t number, uint64_t seed,
                     char* memory) {
  State state;
  state.Begin(memory, memory);
  RandomBits random(static_cast<uint64_t>(number), seed);
  for (int i = 0; i < kTile; i += kWide * kLanes) {
    Words bits[kWide];
    for (Words& b : bits) b = random.Next();
    state.template Save<kState, false>(i, LoadAs<Wide>(from + i), bits);
  }
  state.template End<kNonNegative>();
}
// To the nearest codes, half away from zero.
template <bool kNonNegative>
inline void EncodeTile(const float* from, char* block) {
  Block8State state;
  state.Begin(block, block);
  Words half[kWide];
  for (Words& bits : half) bits = Words{} + 0x80000;
  for (int i = 0; i < kTile; i += kWide * kLanes) {
    state.template Save<0, false>(i, LoadAs<Wide>(from + i), half);
  }
  state.template End<kNonNegative>();
}

}  // namespace
}  // namespace tessera::TESSERA_STEP_ISA
#endif  // OPTIM_KERNELS_TILES_H_
