// The loops of StepElements, and of block8.h. Compiled once for each
// instruction set, with its flags and TESSERA_STEP_ISA, a name of its own
// (BUILD). Nothing here may come from a shared template or inline function: the
// linker could take its AVX-512 copy for all. (Formulas are templates of a type
// that is this file's own.)
//
// Why tiles. Gradient, states and working copy have three, three and four
// types: a loop for each combination and formula would be a thousand. So 64
// elements at a time: of states each type has a loop; gradients and working
// copies of other types pass through a copy that stays in the first-level
// cache.
//
// What limits a step is memory, and next to it the number of instructions: two
// threads of one core share its width. A division by a constant as three FMAs
// (Markstein) costs more than the division; a branch in the loop, or anything
// inlined beside it, half as much as all of it.
#include <cstdint>
#include <utility>

#include "optim/formulas/formulas.h"
#include "optim/kernels/element_step.h"
#include "optim/kernels/tiles.h"
#include "optim/kernels/vectors.h"
#include "optim/kernels/wide.h"

namespace tessera::TESSERA_STEP_ISA {
namespace {

// What is fetched ahead, in elements; the processor's own prefetchers stop at
// the end of a page.
constexpr int64_t kAhead = 512;

struct Constants {
  explicit Constants(const StepCoefficients& k)
      : variant(k.variant),
        factor(Vector::Of(static_cast<float>(k.gradient_factor * k.sign))),
        seed(k.seed),
        average_weight(Vector::Of(static_cast<float>(k.average_weight))) {
    for (int i = 0; i < kMaxCoefficients; ++i) {
      c[i] = Vector::Of(static_cast<float>(k.values[i]));
    }
  }
  Vector c[kMaxCoefficients];
  bool variant;
  Vector factor;
  uint64_t seed;
  Vector average_weight;
};

// Where a tile's elements lie.
struct Tile {
  const float* master;
  float* new_master;
  const float* gradient;
  char* states[kMaxStates];
  char* new_states[kMaxStates];
  int64_t number;  // of the first element in its parameter
};

// kPast: new_states are written past the caches; the masters are not.
template <typename F, bool kVariant, bool kPast, typename State, int... kState>
inline void StepTile(const Tile& t, const Constants& k, State* states,
                     std::integer_sequence<int, kState...>) {
  (states[kState].Begin(t.states[kState], t.new_states[kState]), ...);
  RandomBits random(static_cast<uint64_t>(t.number), k.seed);
  for (int i = 0; i < kTile; i += kWide * kLanes) {
    auto master = LoadAs<Wide>(t.master + i);
    const Wide g = LoadAs<Wide>(t.gradient + i) * k.factor;
    Wide x[] = {states[kState].template Load<IsNonNegative<F>(kState)>(i)...,
                {}};
    F::Step(k.c, kVariant, g, &master, x);
    Store(OneNan(master), t.new_master + i);
    Words bits[kWide];
    if constexpr (State::kRandom) {
      for (Words& b : bits) b = random.Next();
    }
    (states[kState].template Save<kState, kPast>(i, x[kState], bits), ...);
  }
  (states[kState].template End<IsNonNegative<F>(kState)>(), ...);
}

// Between memory and float32, of all states.
template <typename F, typename State, int... kState>
void LoadStates(char memory[][kTile * 4], float to[][kTile],
                std::integer_sequence<int, kState...>) {
  (LoadTile<State, IsNonNegative<F>(kState)>(memory[kState], to[kState]), ...);
}
template <typename F, typename State, int... kState>
void SaveStates(const float from[][kTile], int64_t number, uint64_t seed,
                char memory[][kTile * 4],
                std::integer_sequence<int, kState...>) {
  (SaveTile<State, IsNonNegative<F>(kState), kState>(from[kState], number, seed,
                                                     memory[kState]),
   ...);
}

// ---- a range

template <typename F>
class Loop {
 public:
  Loop(const StepRange& range, const StepCoefficients& k) : r_(range), k_(k) {
    if (r_.new_master == nullptr) r_.new_master = r_.master;
    for (int s = 0; s < F::kStates; ++s) {
      if (r_.new_states[s] == nullptr) r_.new_states[s] = r_.states[s];
    }
  }

  void Run() const {
    if (r_.numel == 0) return;
    if constexpr (F::kHasVariant) {
      if (k_.variant) return RunVariant<true>();
    }
    RunVariant<false>();
  }

 private:
  using EachState = std::make_integer_sequence<int, F::kStates>;

  template <bool kVariant>
  void RunVariant() const {
    if constexpr (F::kStates > 0) {
      switch (r_.state_type) {
        case NumberType::kBFloat16:
          return RunAs<kVariant, false, BFloat16State>();
        case NumberType::kBlock8:
          return RunAs<kVariant, false, Block8State>();
        default:
          break;
      }
    }
    if (!GoesPastCaches()) return RunAs<kVariant, false, Float32State>();
    RunAs<kVariant, true, Float32State>();
    _mm_sfence();
  }

  // What is changed in place stays in the caches, where it was read to.
  bool GoesPastCaches() const {
    if (!r_.past_caches || split() || narrow()) return false;
    const auto aligned = [](const void* p) {
      return reinterpret_cast<uintptr_t>(p) % 64 == 0;
    };
    bool elsewhere = r_.new_master != r_.master && aligned(r_.new_master);
    for (int s = 0; s < F::kStates; ++s) {
      elsewhere &=
          r_.new_states[s] != r_.states[s] && aligned(r_.new_states[s]);
    }
    return elsewhere && aligned(r_.working);
  }

  template <bool kVariant, bool kPast, typename State>
  void RunAs() const {
    int64_t i = 0;
    if (r_.in_block != 0) {
      const int64_t rest = kTile - r_.in_block;
      i = rest < r_.numel ? rest : r_.numel;
      Partial<kVariant, State>(0, static_cast<int>(i), r_.in_block);
    }
    State states[F::kStates + 1];
    for (; i + kTile <= r_.numel; i += kTile) {
      Prefetch(i + kAhead);
      Whole<kVariant, kPast>(i, states);
    }
    if (i < r_.numel) {
      Partial<kVariant, State>(i, static_cast<int>(r_.numel - i), 0);
    }
  }

  float* MasterAt(void* of, int64_t i) const {
    return static_cast<float*>(of) + i;
  }
  bool split() const { return r_.master_type == NumberType::kRemainder; }
  bool narrow() const {
    return r_.master_type != NumberType::kFloat32 && !split();
  }
  uint16_t* NarrowAt(void* of, int64_t i) const {
    return static_cast<uint16_t*>(of) + i;
  }
  // As StateAt, where it is written.
  char* NewStateAt(int s, int64_t i) const {
    return r_.new_states[s] == r_.states[s]
               ? StateAt(s, i)
               : static_cast<char*>(r_.new_states[s]) +
                     i * ItemBytes(r_.state_type);
  }
  const char* GradientAt(int64_t i) const {
    return static_cast<const char*>(r_.gradient) +
           i * ItemBytes(r_.gradient_type);
  }
  char* WorkingAt(int64_t i) const {
    return static_cast<char*>(r_.working) + i * ItemBytes(r_.working_type);
  }
  // Returns the state of element i; with kBlock8 its block.
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
    fetch(static_cast<char*>(r_.master) + i * ItemBytes(r_.master_type),
          kTile * ItemBytes(r_.master_type));
    if (split()) fetch(WorkingAt(i), kTile * ItemBytes(r_.working_type));
    if (r_.average != nullptr) fetch(MasterAt(r_.average, i), kTile * 4);
    const int64_t state_bytes = r_.state_type == NumberType::kBlock8
                                    ? kTile
                                    : kTile * ItemBytes(r_.state_type);
    for (int s = 0; s < F::kStates; ++s) fetch(StateAt(s, i), state_bytes);
  }

  template <bool kVariant, bool kPast, typename State>
  void Whole(int64_t i, State* states) const {
    Tile t;
    t.master = MasterAt(r_.master, i);
    t.new_master = MasterAt(r_.new_master, i);
    alignas(64) float gradient[kTile];
    t.gradient = reinterpret_cast<const float*>(GradientAt(i));
    if (r_.gradient_type != NumberType::kFloat32) {
      From16(GradientAt(i), r_.gradient_type, gradient);
      t.gradient = gradient;
    }
    for (int s = 0; s < F::kStates; ++s) {
      t.states[s] = StateAt(s, i);
      t.new_states[s] = NewStateAt(s, i);
    }
    t.number = r_.number + i;
    if (narrow()) {
      alignas(64) float master[kTile];
      t.master = t.new_master = master;
      From16(NarrowAt(r_.master, i), r_.master_type, master);
      StepTile<F, kVariant, kPast>(t, k_, states, EachState());
      ToMasters(master, t.number, k_.seed ^ kMasterSeed, r_.master_type,
                NarrowAt(r_.new_master, i));
      return;
    }
    alignas(64) float joined[kTile];
    if (split()) {
      t.master = t.new_master = joined;
      Join(NarrowAt(r_.working, i), NarrowAt(r_.master, i), joined);
    }
    if (kPast) t.new_master = joined;  // they are read again here
    StepTile<F, kVariant, kPast>(t, k_, states, EachState());
    if (kPast) {
      ToWorking<true>(joined, NumberType::kFloat32, MasterAt(r_.new_master, i));
    }
    if (r_.average != nullptr) {
      AverageTile(t.new_master, k_.average_weight, MasterAt(r_.average, i));
    }
    if (split()) {
      Split(joined, NarrowAt(r_.working, i), NarrowAt(r_.master, i));
    } else if (r_.working_type != NumberType::kNone) {
      ToWorking<kPast>(t.new_master, r_.working_type, WorkingAt(i));
    }
  }

  // Elements i .. i + n, which are `lead` and those after it of a tile that is
  // a copy.
  template <bool kVariant, typename State>
  void Partial(int64_t i, int n, int lead) const {
    float master[kTile] = {}, gradient[kTile] = {};
    LoadMasters(i, n, master + lead);
    LoadPart(r_.gradient, r_.gradient_type, i, n, gradient + lead);
    char memory[F::kStates + 1][kTile * 4] = {};
    float states[F::kStates + 1][kTile] = {}, before[F::kStates + 1][kTile];
    Tile t = {master, master, gradient, {}, {}, r_.number + i - lead};
    for (int s = 0; s < F::kStates; ++s) {
      t.states[s] = t.new_states[s] = reinterpret_cast<char*>(states[s]);
      Copy(StateAt(s, i), StateSize(n), PartOf(memory[s], lead));
    }
    LoadStates<F, State>(memory, states, EachState());
    Copy(states, sizeof(states), before);
    Float32State floats[F::kStates + 1];
    StepTile<F, kVariant, false>(t, k_, floats, EachState());
    // What is no element of this range stays.
    for (int s = 0; s < F::kStates; ++s) {
      for (int j = 0; j < kTile; ++j) {
        if (j < lead || j >= lead + n) states[s][j] = before[s][j];
      }
    }
    SaveStates<F, State>(states, t.number, k_.seed, memory, EachState());
    for (int s = 0; s < F::kStates; ++s) {
      Copy(PartOf(memory[s], lead), StateSize(n), NewStateAt(s, i));
    }
    StoreMasters(master, t.number, i, n, lead);
  }

  void LoadMasters(int64_t i, int n, float* to) const {
    if (!split()) return LoadPart(r_.master, r_.master_type, i, n, to);
    uint16_t working[kTile] = {}, remainders[kTile] = {};
    float joined[kTile];
    Copy(NarrowAt(r_.working, i), Size(n, 2), working);
    Copy(NarrowAt(r_.master, i), Size(n, 2), remainders);
    Join(working, remainders, joined);
    Copy(joined, Size(n, 4), to);
  }

  static void LoadPart(const void* all, NumberType type, int64_t i, int n,
                       float* to) {
    const char* const from =
        static_cast<const char*>(all) + i * ItemBytes(type);
    if (type == NumberType::kFloat32) return Copy(from, Size(n, 4), to);
    uint16_t halves[kTile] = {};
    float wide[kTile];
    Copy(from, Size(n, 2), halves);
    From16(halves, type, wide);
    Copy(wide, Size(n, 4), to);
  }

  void StoreMasters(const float* master, int64_t number, int64_t i, int n,
                    int lead) const {
    if (narrow()) {
      uint16_t halves[kTile];
      ToMasters(master, number, k_.seed ^ kMasterSeed, r_.master_type, halves);
      return Copy(halves + lead, Size(n, 2), NarrowAt(r_.new_master, i));
    }
    if (!split()) Copy(master + lead, Size(n, 4), MasterAt(r_.new_master, i));
    if (r_.average != nullptr) {
      float average[kTile] = {};
      Copy(MasterAt(r_.average, i), Size(n, 4), average + lead);
      AverageTile(master, k_.average_weight, average);
      Copy(average + lead, Size(n, 4), MasterAt(r_.average, i));
    }
    if (split()) {
      uint16_t upper[kTile], lower[kTile];
      Split(master, upper, lower);
      Copy(upper + lead, Size(n, 2), NarrowAt(r_.working, i));
      return Copy(lower + lead, Size(n, 2), NarrowAt(r_.master, i));
    }
    if (r_.working_type == NumberType::kNone) return;
    char working[kTile * 4];
    ToWorking<false>(master, r_.working_type, working);
    const int64_t item = ItemBytes(r_.working_type);
    Copy(working + lead * item, Size(n, item), WorkingAt(i));
  }

  static void Copy(const void* from, size_t bytes, void* to) {
    __builtin_memcpy(to, from, bytes);
  }
  static size_t Size(int n, int64_t item) {
    return static_cast<size_t>(n * item);
  }
  // Returns the bytes of n elements of a tile's states; a block is always
  // whole.
  size_t StateSize(int n) const {
    return r_.state_type == NumberType::kBlock8
               ? static_cast<size_t>(kBlock8Bytes)
               : Size(n, ItemBytes(r_.state_type));
  }
  char* PartOf(char* memory, int lead) const {
    return r_.state_type == NumberType::kBlock8
               ? memory
               : memory + lead * ItemBytes(r_.state_type);
  }

  StepRange r_;
  const Constants k_;
};

}  // namespace

void Step(Formula formula, const StepRange& range, const StepCoefficients& k) {
  VisitFormula(formula, [&](auto f) { Loop<decltype(f)>(range, k).Run(); });
}

void Decode(const char* blocks, int64_t numel, bool non_negative, float* to) {
  for (int64_t i = 0; i < numel; i += kTile, blocks += kBlock8Bytes) {
    const int64_t n = numel - i < kTile ? numel - i : kTile;
    float tile[kTile];
    non_negative ? LoadTile<Block8State, true>(blocks, tile)
                 : LoadTile<Block8State, false>(blocks, tile);
    __builtin_memcpy(to + i, tile, static_cast<size_t>(n) * 4);
  }
}

void Encode(const float* from, int64_t numel, bool non_negative, char* blocks) {
  for (int64_t i = 0; i < numel; i += kTile, blocks += kBlock8Bytes) {
    const int64_t n = numel - i < kTile ? numel - i : kTile;
    float tile[kTile] = {};
    __builtin_memcpy(tile, from + i, static_cast<size_t>(n) * 4);
    if (non_negative) {
      for (float& x : tile) x = __builtin_fabsf(x);
    }
    non_negative ? EncodeTile<true>(tile, blocks)
                 : EncodeTile<false>(tile, blocks);
  }
}

}  // namespace tessera::TESSERA_STEP_ISA
