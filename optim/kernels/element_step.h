// StepElements: one step of an elementwise optimizer on a range of masters on
// the CPU, in one pass over memory: it reads the gradient in whatever type that
// has, scales it on the way, updates masters and states, and writes a working
// copy.
//
// What is computed: optim/formulas/formulas.h; from which numbers:
// CoefficientsOf (optim/algorithms/coefficients.h).
//
// Note [Bits of a step]
// An element's bits depend on that element's inputs alone (with kBlock8 on
// those of its block): not on instruction set, threads, alignment, or where a
// range begins or ends. NaN is always written as 0x7fc00000, in a working copy
// as what at::Tensor::copy_ makes of that: 0xffff in bfloat16, 0x7e00 in
// float16.
//
// Note [Stochastic rounding]
// States of kBFloat16 and kBlock8, and masters of 16 bits, are rounded to one
// of the two neighbours, up with the probability of what is lost by rounding
// down, so that small changes add up (a moment that decays by 0.999 would stand
// still in 8 bits of mantissa). The random bits are a function of
// StepCoefficients::seed (the step and the parameter) and of the element's
// number in its parameter: the same at every world size. Magnitudes below 2^-32
// are 0 in float16.
//
// Masters of kRemainder have the bits that float32 masters have; how a working
// copy is rounded beside them says "Note [Ties of remainders]"
// (offload/remainders.h), and its NaN is 0x7fc0.
//
// Threads: none of its own; ranges that do not overlap, and share no block of
// kBlock8, may be done at once.
#ifndef OPTIM_KERNELS_ELEMENT_STEP_H_
#define OPTIM_KERNELS_ELEMENT_STEP_H_

#include <cstdint>

#include "base/isa.h"
#include "optim/formulas/formula.h"
#include "optim/formulas/formulas.h"

namespace tessera {

// Makes the random bits of masters differ from those of the states.
inline constexpr uint64_t kMasterSeed = 0xd1b54a32d192ed03;

enum class NumberType : uint8_t {
  kNone,
  kFloat32,
  kBFloat16,
  kFloat16,
  kFloat64,
  kBlock8,     // optim/kernels/block8.h
  kRemainder,  // of masters: offload/remainders.h
};
int64_t BytesOf(NumberType type, int64_t numel);

struct StepRange {
  void* master = nullptr;
  void* states[kMaxStates] = {};  // of kBlock8: the first element's block
  const void* gradient = nullptr;
  int64_t numel = 0;  // of each
  // kFloat64: so are all others, and the working copy is kNone. kBFloat16 and
  // kFloat16: without a working copy and an average, of no direction.
  // kRemainder: the working copy, of kBFloat16, is read as the other half of
  // masters; they are changed in place.
  NumberType master_type = NumberType::kFloat32;
  NumberType state_type = NumberType::kFloat32;  // kBFloat16, kBlock8
  NumberType gradient_type = NumberType::kFloat32;
  NumberType working_type = NumberType::kNone;
  void* working = nullptr;
  // Where new masters are written while the old ones stay, or the direction. It
  // overlaps no other memory, or is the gradient itself (of the masters' type).
  // Null: masters are changed in place.
  void* new_master = nullptr;
  // Where new states are written, except kBlock8; null: in place.
  void* new_states[kMaxStates] = {};
  // Whether what is only written (new_master, new_states, the working copy) is
  // written past the caches where it is aligned to 64 bytes: nobody reads it
  // soon, and a line that is written in the caches is read from memory first.
  bool past_caches = false;
  // The average, of AverageType: it becomes lerp(average, new master,
  // average_weight), one FMA. Null: there is none.
  void* average = nullptr;
  // The first element's number in its parameter, for random bits, and its place
  // in its block of kBlock8.
  int64_t number = 0;
  int in_block = 0;
};

// Returns the type of averages of masters of that type.
NumberType AverageType(NumberType masters);

// A range and what it is stepped with.
struct StepPart {
  StepRange range;
  StepCoefficients coefficients;
};

// Steps a range. LOCAL. REQUIRES: the memory of `range` does not overlap.
void StepElements(Formula formula, const StepRange& range,
                  const StepCoefficients& coefficients, Isa isa = BestIsa());

// Returns elements [begin, end) of a range.
StepRange Part(const StepRange& range, int64_t begin, int64_t end);

}  // namespace tessera
#endif  // OPTIM_KERNELS_ELEMENT_STEP_H_
