// The loops of StepElements. Compiled once for each instruction set, with its
// flags and TESSERA_STEP_ISA, a name of its own (BUILD). Nothing here may come
// from a shared template or inline function: the linker could take its AVX-512
// copy for all. (Formulas are templates of a type that is this file's own.)
//
// Why tiles. Gradient, states and working copy have four, three and four types:
// a loop for each combination and formula would be a thousand. So 64 elements
// at a time are brought to float32, in a copy that stays in the first-level
// cache where memory holds another type; the formula works on float32 alone.
// What limits a step is memory, many times over.
#include <cstdint>

#include "optim/kernels/element_step.h"
#include "optim/kernels/formulas.h"
#include "optim/kernels/vectors.h"

namespace tessera::TESSERA_STEP_ISA {
namespace {

constexpr int kTile = kBlock8Elements;
// What is fetched ahead, in elements; the processor's own prefetchers stop at
// the end of a page.
constexpr int64_t kAhead = 512;

struct Constants {
  Constants(const StepCoefficients& k, int count)
      : variant(k.variant),
        factor(Vector::Of(static_cast<float>(k.gradient_factor * k.sign))),
        seed(k.seed),
        average_weight(Vector::Of(static_cast<float>(k.average_weight))) {
    for (int i = 0; i < count; ++i) {
      c[i] = Vector::Of(static_cast<float>(k.values[i]));
    }
  }
  Vector c[kMaxCoefficients];
  bool variant;
  Vector factor;
  uint64_t seed;
  Vector average_weight;
};

// Where a tile's elements lie as float32.
struct Tile {
  const float* master;
  float* new_master;
  const float* gradient;
  float* states[kMaxStates];
};

template <typename F>
inline void StepTile(const Tile& t, const Constants& k) {
  for (int i = 0; i < kTile; i += kLanes) {
    Vector master = {LoadAs<Floats>(t.master + i)};
    const Vector g = Vector{LoadAs<Floats>(t.gradient + i)} * k.factor;
    Vector states[F::kStates + 1];
    for (int s = 0; s < F::kStates; ++s) {
      states[s] = {LoadAs<Floats>(t.states[s] + i)};
    }
    F::Step(k.c, k.variant, g, &master, states);
    Store(master.x, t.new_master + i);
    for (int s = 0; s < F::kStates; ++s) Store(states[s].x, t.states[s] + i);
  }
}

// From the nearer end would be no other here: weights are small, or 1.
void AverageTile(const float* master, const Constants& k, float* average) {
  for (int i = 0; i < kTile; i += kLanes) {
    const Vector a = {LoadAs<Floats>(average + i)};
    const Vector m = {LoadAs<Floats>(master + i)};
    Store(OneNan(MultiplyAdd(k.average_weight, m - a, a)).x, average + i);
  }
}

// ---- between memory and float32

int64_t ItemBytes(NumberType type) {
  return type == NumberType::kNone ? 0 : type == NumberType::kFloat32 ? 4 : 2;
}

void From16(const void* from, NumberType type, float* to) {
  const auto* const halves = static_cast<const uint16_t*>(from);
  for (int i = 0; i < kTile; i += kLanes) {
    const auto x = LoadAs<Halves>(halves + i);
    Store(type == NumberType::kBFloat16 ? FromBFloat16(x) : FromFloat16(x),
          to + i);
  }
}

void ToWorking(const float* from, NumberType type, void* to) {
  for (int i = 0; i < kTile; i += kLanes) {
    const auto x = LoadAs<Floats>(from + i);
    if (type == NumberType::kFloat32) {
      Store(x, static_cast<float*>(to) + i);
    } else {
      Store(type == NumberType::kBFloat16 ? ToBFloat16(x) : ToFloat16(x),
            static_cast<uint16_t*>(to) + i);
    }
  }
}

// 32 bits for each element of a tile; `number`: the first one's.
void RandomTile(int64_t number, uint64_t seed, uint32_t* to) {
  const auto high = static_cast<uint32_t>(seed >> 32);
  Words lane;
  for (int j = 0; j < kLanes; ++j) lane[j] = static_cast<uint32_t>(j);
  for (int i = 0; i < kTile; i += kLanes) {
    // Elements of a vector may differ in the upper half of their numbers.
    const auto first = static_cast<uint64_t>(number + i);
    const Words low = lane + static_cast<uint32_t>(first);
    const Words carry =
        low < static_cast<uint32_t>(first) ? Words{} + 1 : Words{};
    const Words upper = carry + static_cast<uint32_t>(first >> 32);
    Store(RandomBits(low ^ upper * 0x85ebca6bu, static_cast<uint32_t>(seed),
                     high),
          to + i);
  }
}

// 16 of the 32 bits, others for each state.
void ToBFloat16State(const float* from, int state, const uint32_t* random,
                     uint16_t* to) {
  for (int i = 0; i < kTile; i += kLanes) {
    const auto all = LoadAs<Words>(random + i);
    const Words bits = state == 0   ? all & 0xffff
                       : state == 1 ? all >> 16
                                    : all >> 8 & 0xffff;
    Store(ToBFloat16Randomly(LoadAs<Floats>(from + i), bits), to + i);
  }
}

template <bool kNonNegative>
void FromBlock8(const char* from, float* to) {
  float scale;
  __builtin_memcpy(&scale, from + kTile, sizeof(scale));
  for (int i = 0; i < kTile; i += kLanes) {
    const Floats x = FromCodes<kNonNegative>(LoadAs<Bytes>(from + i));
    // A scale that is NaN is the one NaN already, and so is its product.
    Store((Vector{x} * Vector::Of(scale)).x, to + i);
  }
}

template <bool kNonNegative>
void ToBlock8(const float* from, char* to) {
  Words most = Words{} + 0x00800000;  // 2^-126
  for (int i = 0; i < kTile; i += kLanes) {
    const Words rest = LoadAs<Words>(from + i) & 0x7fffffff;
    most = rest > most ? rest : most;
  }
  uint32_t largest = __builtin_reduce_max(most);
  const bool finite = largest < 0x7f800000;
  if (!finite) largest = 0x7fc00000;
  float scale;
  __builtin_memcpy(&scale, &largest, sizeof(scale));
  const Vector inverse = Vector::Of(finite ? 1 / scale : 0);
  for (int i = 0; i < kTile; i += kLanes) {
    const Vector x = Vector{LoadAs<Floats>(from + i)} * inverse;
    Store(finite ? ToCodes<kNonNegative>(x.x) : Bytes{}, to + i);
  }
  __builtin_memcpy(to + kTile, &scale, sizeof(scale));
}

// ---- a range

template <typename F>
class Loop {
 public:
  Loop(const StepRange& range, const StepStates& states,
       const StepCoefficients& k)
      : r_(range), states_(states), k_(k, kMaxCoefficients) {
    if (r_.new_master == nullptr) r_.new_master = r_.master;
  }

  void Run() const {
    int64_t i = 0;
    if (r_.in_block != 0) {
      const int64_t rest = kTile - r_.in_block;
      i = rest < r_.numel ? rest : r_.numel;
      Partial(0, static_cast<int>(i), r_.in_block);
    }
    for (; i + kTile <= r_.numel; i += kTile) {
      Prefetch(i + kAhead);
      Whole(i);
    }
    if (i < r_.numel) Partial(i, static_cast<int>(r_.numel - i), 0);
  }

 private:
  using Buffers = float[F::kStates + 1][kTile];

  float* MasterAt(void* of, int64_t i) const {
    return static_cast<float*>(of) + i;
  }
  const char* GradientAt(int64_t i) const {
    return static_cast<const char*>(r_.gradient) +
           i * ItemBytes(r_.gradient_type);
  }
  char* WorkingAt(int64_t i) const {
    return static_cast<char*>(r_.working) + i * ItemBytes(r_.working_type);
  }
  // Of element i; with kBlock8 its block.
  char* StateAt(int s, int64_t i) const {
    char* const all = static_cast<char*>(r_.states[s]);
    return r_.state_type == NumberType::kBlock8
               ? all + (r_.in_block + i) / kTile * kBlock8Bytes
               : all + i * ItemBytes(r_.state_type);
  }

  // May lie beyond the end: that is no access.
  void Prefetch(int64_t i) const {
    const auto fetch = [](const void* from, int64_t bytes) {
      for (int64_t b = 0; b < bytes; b += 64) {
        __builtin_prefetch(static_cast<const char*>(from) + b, 1);
      }
    };
    for (int64_t b = 0; b < kTile * ItemBytes(r_.gradient_type); b += 64) {
      __builtin_prefetch(GradientAt(i) + b);
    }
    fetch(MasterAt(r_.master, i), kTile * 4);
    if (r_.average != nullptr) fetch(MasterAt(r_.average, i), kTile * 4);
    const int64_t state_bytes = r_.state_type == NumberType::kBlock8
                                    ? kTile
                                    : kTile * ItemBytes(r_.state_type);
    for (int s = 0; s < F::kStates; ++s) fetch(StateAt(s, i), state_bytes);
  }

  void LoadStates(int64_t i, Buffers& buffers) const {
    for (int s = 0; s < F::kStates; ++s) {
      if (r_.state_type == NumberType::kBFloat16) {
        From16(StateAt(s, i), NumberType::kBFloat16, buffers[s]);
      } else if (states_.states[s].non_negative) {
        FromBlock8<true>(StateAt(s, i), buffers[s]);
      } else {
        FromBlock8<false>(StateAt(s, i), buffers[s]);
      }
    }
  }

  // `number`: of the tile's first element.
  void StoreStates(int64_t i, int64_t number, const Buffers& buffers) const {
    alignas(64) uint32_t random[kTile];
    if (r_.state_type == NumberType::kBFloat16) {
      RandomTile(number, k_.seed, random);
    }
    for (int s = 0; s < F::kStates; ++s) {
      char* const to = StateAt(s, i);
      if (r_.state_type == NumberType::kBFloat16) {
        ToBFloat16State(buffers[s], s, random, reinterpret_cast<uint16_t*>(to));
      } else if (states_.states[s].non_negative) {
        ToBlock8<true>(buffers[s], to);
      } else {
        ToBlock8<false>(buffers[s], to);
      }
    }
  }

  void Whole(int64_t i) const {
    alignas(64) float gradient[kTile];
    alignas(64) Buffers buffers;
    Tile t;
    t.master = MasterAt(r_.master, i);
    t.new_master = MasterAt(r_.new_master, i);
    t.gradient = reinterpret_cast<const float*>(GradientAt(i));
    if (r_.gradient_type != NumberType::kFloat32) {
      From16(GradientAt(i), r_.gradient_type, gradient);
      t.gradient = gradient;
    }
    const bool in_place = r_.state_type == NumberType::kFloat32;
    if (!in_place) LoadStates(i, buffers);
    for (int s = 0; s < F::kStates; ++s) {
      t.states[s] =
          in_place ? reinterpret_cast<float*>(StateAt(s, i)) : buffers[s];
    }
    StepTile<F>(t, k_);
    if (r_.average != nullptr) {
      AverageTile(t.new_master, k_, MasterAt(r_.average, i));
    }
    if (!in_place) StoreStates(i, r_.number + i, buffers);
    if (r_.working_type != NumberType::kNone) {
      ToWorking(t.new_master, r_.working_type, WorkingAt(i));
    }
  }

  // Elements i .. i + n, which are `lead` and those after it of a tile that is
  // a copy.
  void Partial(int64_t i, int n, int lead) const {
    float master[kTile] = {}, gradient[kTile] = {};
    Buffers buffers = {}, before;
    __builtin_memcpy(master + lead, MasterAt(r_.master, i), Floats4(n));
    LoadGradient(i, n, gradient + lead);
    LoadPartOfStates(i, n, lead, buffers);
    __builtin_memcpy(before, buffers, sizeof(before));
    Tile t = {master, master, gradient, {}};
    for (int s = 0; s < F::kStates; ++s) t.states[s] = buffers[s];
    StepTile<F>(t, k_);
    __builtin_memcpy(MasterAt(r_.new_master, i), master + lead, Floats4(n));
    if (r_.average != nullptr) {
      float average[kTile] = {};
      __builtin_memcpy(average + lead, MasterAt(r_.average, i), Floats4(n));
      AverageTile(master, k_, average);
      __builtin_memcpy(MasterAt(r_.average, i), average + lead, Floats4(n));
    }
    // What is no element of this range stays.
    for (int s = 0; s < F::kStates; ++s) {
      for (int j = 0; j < kTile; ++j) {
        if (j < lead || j >= lead + n) buffers[s][j] = before[s][j];
      }
    }
    StorePartOfStates(i, n, lead, buffers);
    if (r_.working_type == NumberType::kNone) return;
    char working[kTile * 4];
    ToWorking(master, r_.working_type, working);
    const int64_t item = ItemBytes(r_.working_type);
    __builtin_memcpy(WorkingAt(i), working + lead * item,
                     static_cast<size_t>(n * item));
  }

  static size_t Floats4(int n) { return static_cast<size_t>(n) * 4; }

  void LoadGradient(int64_t i, int n, float* to) const {
    if (r_.gradient_type == NumberType::kFloat32) {
      __builtin_memcpy(to, GradientAt(i), Floats4(n));
      return;
    }
    uint16_t halves[kTile] = {};
    float all[kTile];
    __builtin_memcpy(halves, GradientAt(i), Floats4(n) / 2);
    From16(halves, r_.gradient_type, all);
    __builtin_memcpy(to, all, Floats4(n));
  }

  void LoadPartOfStates(int64_t i, int n, int lead, Buffers& buffers) const {
    if (r_.state_type == NumberType::kBlock8) return LoadStates(i, buffers);
    for (int s = 0; s < F::kStates; ++s) {
      if (r_.state_type == NumberType::kFloat32) {
        __builtin_memcpy(buffers[s] + lead, StateAt(s, i), Floats4(n));
        continue;
      }
      uint16_t halves[kTile] = {};
      __builtin_memcpy(halves + lead, StateAt(s, i), Floats4(n) / 2);
      From16(halves, NumberType::kBFloat16, buffers[s]);
    }
  }

  void StorePartOfStates(int64_t i, int n, int lead,
                         const Buffers& buffers) const {
    if (r_.state_type == NumberType::kBlock8) {
      return StoreStates(i, 0, buffers);
    }
    for (int s = 0; s < F::kStates; ++s) {
      if (r_.state_type == NumberType::kFloat32) {
        __builtin_memcpy(StateAt(s, i), buffers[s] + lead, Floats4(n));
        continue;
      }
      uint32_t random[kTile];
      RandomTile(r_.number + i - lead, k_.seed, random);
      uint16_t halves[kTile];
      ToBFloat16State(buffers[s], s, random, halves);
      __builtin_memcpy(StateAt(s, i), halves + lead, Floats4(n) / 2);
    }
  }

  StepRange r_;
  const StepStates& states_;
  const Constants k_;
};

}  // namespace

void Step(Formula formula, const StepRange& range, const StepStates& states,
          const StepCoefficients& k) {
  VisitFormula(formula,
               [&](auto f) { Loop<decltype(f)>(range, states, k).Run(); });
}

}  // namespace tessera::TESSERA_STEP_ISA
