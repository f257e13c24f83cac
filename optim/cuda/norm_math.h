// Gradient norms on a device, with the bits of NormSum
// (optim/norm/grad_norm.h), as functions that CPU and GPU share: the kernels
// differ from their CPU twins, AddToNormOnHost and FinishNormOnHost, in who
// does which lane, block or digit.
//
//   elements -> LaneSum -> a block's sum -> DigitWindow -> digits -> Carried
//   all ranks' words -> WordOfGroup -> Carried -> WriteScalars
//
// A sum is its words: digits and the greatest block that has no place there
// (optim/step_scalars.h).
#ifndef OPTIM_CUDA_NORM_MATH_H_
#define OPTIM_CUDA_NORM_MATH_H_

#include <cstdint>

#include "optim/cuda/arithmetic.h"
#include "optim/step_scalars.h"

namespace tessera {

// The values of p that have kernels; roots for other p need the CPU's pow.
enum class NormPower { kOne, kTwo, kInfinity };

inline bool HasNormPower(double p) {
  return p == 1 || p == 2 || (p > 0 && std::isinf(p));
}
// REQUIRES: HasNormPower(p).
TESSERA_HOST_DEVICE inline NormPower NormPowerOf(double p) {
  return p == 1   ? NormPower::kOne
         : p == 2 ? NormPower::kTwo
                  : NormPower::kInfinity;
}

// ---- a block's sum: that of optim/norm/block_powers.h

inline constexpr int kNormLanes = 8;
inline constexpr int kNormTurns = 8;  // elements of a lane
inline constexpr int kNormBlockNumel = kNormLanes * kNormTurns;

// Elements of one parameter: T is float, double, c10::Half or c10::BFloat16.
template <typename T>
struct NormSegment {
  NormSegment() = default;
  NormSegment(const T* x, int64_t numel, int64_t first)
      : x(x),
        numel(numel),
        head(first % kNormBlockNumel),
        blocks((head + numel + kNormBlockNumel - 1) / kNormBlockNumel) {}
  const T* x = nullptr;
  int64_t numel = 0;
  int64_t head = 0;    // of the first block's elements, that many are not here
  int64_t blocks = 0;  // that it touches
};

// Segments that are added by one launch. Their blocks are numbered
// consecutively, in the order of the segments.
template <typename T>
struct NormBatch {
  // A launch takes at most 4 KiB of arguments.
  static constexpr int kMaxSegments = 96;
  // REQUIRES: !full().
  void Add(const NormSegment<T>& segment) {
    segments[count] = segment;
    first_block[count + 1] = first_block[count] + segment.blocks;
    ++count;
  }
  bool full() const { return count == kMaxSegments; }
  TESSERA_HOST_DEVICE int64_t blocks() const { return first_block[count]; }
  // Returns the segment that has `block`, which is `from` or a later one.
  TESSERA_HOST_DEVICE int SegmentOf(int64_t block, int from) const {
    while (block >= first_block[from + 1]) ++from;
    return from;
  }
  int count = 0;
  NormSegment<T> segments[kMaxSegments];
  int64_t first_block[kMaxSegments + 1] = {};
};
static_assert(sizeof(NormBatch<float>) + sizeof(void*) <= 4096, "");

template <NormPower kPower>
TESSERA_HOST_DEVICE inline double PowerOf(double x) {
  if (kPower == NormPower::kTwo) return Times(x, x);
  return BitCast<double>(BitCast<uint64_t>(x) << 1 >> 1);
}

template <NormPower kPower>
TESSERA_HOST_DEVICE inline double Join(double a, double b) {
  if (kPower == NormPower::kInfinity) return b > a || b != b ? b : a;
  return Plus(a, b);
}

// Sums a block's elements lane, lane + 8, ... Absent ones count as zeros, which
// change no lane.
template <NormPower kPower, typename T>
TESSERA_HOST_DEVICE inline double LaneSum(const NormSegment<T>& segment,
                                          int64_t block, int lane) {
  const int64_t from = block * kNormBlockNumel - segment.head;
  const bool whole = from >= 0 && from + kNormBlockNumel <= segment.numel;
  T x[kNormTurns];
  for (int turn = 0; turn < kNormTurns; ++turn) {
    const int64_t i = from + turn * kNormLanes + lane;
    x[turn] = whole || (0 <= i && i < segment.numel) ? segment.x[i] : T(0);
  }
  double sum = 0;
  for (int turn = 0; turn < kNormTurns; ++turn) {
    sum = Join<kPower>(sum, PowerOf<kPower>(static_cast<double>(x[turn])));
  }
  return sum;
}

// The sums of 8 lanes become that of their block, in each of them: neighbours
// at distance 1, 2, 4 join. On a GPU they are 8 threads of a warp.
template <NormPower kPower>
inline double JoinLanesOnHost(const double* lanes) {
  double now[kNormLanes], next[kNormLanes];
  memcpy(now, lanes, sizeof(now));
  for (int distance = 1; distance < kNormLanes; distance *= 2) {
    for (int lane = 0; lane < kNormLanes; ++lane) {
      next[lane] = Join<kPower>(now[lane], now[lane ^ distance]);
    }
    memcpy(now, next, sizeof(now));
  }
  return now[0];
}

// ---- exact sums: those of optim/norm/exact_sum.h

// x = (part[0] + part[1] 2^32 + part[2] 2^64) 2^(32 digit - 1074)
struct SplitDouble {
  // REQUIRES: x is finite, its sign bit is 0.
  TESSERA_HOST_DEVICE explicit SplitDouble(double x) {
    const uint64_t bits = BitCast<uint64_t>(x);
    const uint64_t exponent = bits >> 52;  // biased, 0 for subnormals
    const uint64_t hidden = static_cast<uint64_t>(exponent > 0);
    const uint64_t mantissa = bits - (exponent << 52) + (hidden << 52);
    const int shift = static_cast<int>(exponent - hidden);
    const int within = shift % 32;
    const uint64_t low = mantissa << within;
    digit = shift / 32;
    part[0] = static_cast<uint32_t>(low);
    part[1] = static_cast<uint32_t>(low >> 32);
    part[2] = static_cast<uint32_t>(mantissa >> 1 >> (63 - within));
  }
  int digit;
  uint32_t part[3];
};

// What one thread adds up before it adds to digits that it shares: block sums
// of like magnitude fall into the same four digits.
//
//   low        low + 1    low + 2    low + 3
//   [ digits ] [ digits ] [ digits ] [ digits ]
struct DigitWindow {
  TESSERA_HOST_DEVICE bool Takes(const SplitDouble& x) const {
    return x.digit == low || x.digit == low + 1;
  }
  // REQUIRES: Takes(x), fewer than 2^32 were added.
  TESSERA_HOST_DEVICE void Add(const SplitDouble& x) {
    const bool up = x.digit != low;
    digits[0] += up ? 0 : x.part[0];
    digits[1] += up ? x.part[0] : x.part[1];
    digits[2] += up ? x.part[1] : x.part[2];
    digits[3] += up ? x.part[2] : 0;
  }
  static constexpr int kDigits = 4;
  int low = 0;
  uint64_t digits[kDigits] = {};
};

// Where a block's sum goes: as it is among digits, or, by its bits, among what
// has no place there.
template <NormPower kPower>
TESSERA_HOST_DEVICE inline bool IsExtreme(double block) {
  return kPower == NormPower::kInfinity || !IsFinite(block);
}

// Digit i after one step of carrying, in which all digits take part at once.
// Repeated until each is below 2^32; the last never overflows.
TESSERA_HOST_DEVICE inline uint64_t CarryStep(const uint64_t* digits, int i) {
  const uint64_t rest =
      i + 1 < kNormDigits ? static_cast<uint32_t>(digits[i]) : digits[i];
  return rest + (i > 0 ? digits[i - 1] >> 32 : 0);
}
TESSERA_HOST_DEVICE inline bool IsCarried(const uint64_t* digits, int i) {
  return i + 1 == kNormDigits || digits[i] >> 32 == 0;
}

inline void CarryOnHost(uint64_t* digits) {
  for (bool carried = false; !carried;) {
    uint64_t next[kNormDigits];
    for (int i = 0; i < kNormDigits; ++i) next[i] = CarryStep(digits, i);
    memcpy(digits, next, sizeof(next));
    carried = true;
    for (int i = 0; i < kNormDigits; ++i) carried &= IsCarried(digits, i);
  }
}

// The nearest double, as ExactSum::Round. REQUIRES: digits are carried.
TESSERA_HOST_DEVICE inline double RoundDigits(const uint64_t* digits) {
  int top = kNormDigits - 1;
  while (top > 1 && digits[top] == 0) --top;
  const uint64_t two = digits[top] << 32 | digits[top - 1];
  // In units of 2^-1074 a double below 2^53 units has its number as its bits.
  if (top == 1 && two >> 53 == 0) return BitCast<double>(two);
  // 64 bits from the highest one on, and whether any is set below.
  int zeros = 0;
  while (two << zeros >> 63 == 0) ++zeros;
  const uint64_t third = top > 1 ? digits[top - 2] : 0;
  const uint64_t leading = two << zeros | (third << zeros) >> 32;
  bool below = static_cast<uint32_t>(third << zeros) != 0;
  for (int i = 0; i < top - 2; ++i) below |= digits[i] != 0;
  // The lowest of the 53 bits that stay is worth 2^shift units.
  const int shift = (top + 1) * 32 - zeros - 53;
  const uint64_t kept = leading >> 11;
  const uint64_t rest = (leading & 0x7ff) << 1 | static_cast<uint64_t>(below);
  const uint64_t up =
      static_cast<uint64_t>(rest > 0x800 || (rest == 0x800 && (kept & 1) != 0));
  const uint64_t bits = (static_cast<uint64_t>(shift) << 52) + kept + up;
  const uint64_t infinity = uint64_t{0x7ff} << 52;
  return BitCast<double>(bits < infinity ? bits : infinity);
}

// ---- all ranks' sums

// Word i of the sum of ranks [begin, end), not carried.
TESSERA_HOST_DEVICE inline uint64_t WordOfGroup(const uint64_t* all,
                                                int64_t begin, int64_t end,
                                                int i) {
  uint64_t sum = 0;
  for (int64_t rank = begin; rank < end; ++rank) {
    const uint64_t word = all[rank * kNormWords + i];
    if (i < kNormDigits) {
      sum += word;
    } else if (word > sum) {
      sum = word;
    }
  }
  return sum;
}

// NormSum::Norm. REQUIRES: words are carried.
TESSERA_HOST_DEVICE inline double NormOfWords(const uint64_t* words,
                                              NormPower power) {
  if (power == NormPower::kInfinity || words[kNormDigits] != 0) {
    return BitCast<double>(words[kNormDigits]);
  }
  const double sum = RoundDigits(words);
  return power == NormPower::kTwo ? SquareRoot(sum) : sum;
}

// optim/norm/grad_norm.h
TESSERA_HOST_DEVICE inline double ClipCoefficientOnDevice(double norm,
                                                          double max_norm) {
  const double divisor = Plus(norm, 1e-6);
  return max_norm > 0 && divisor > max_norm ? Over(max_norm, divisor) : 1;
}

// What StepShards (optim/sharded_step.h) makes of the first group's words.
// `differs`: as kReplicasDiffer. NaN is always 0x7ff8000000000000.
TESSERA_HOST_DEVICE inline void WriteScalars(const uint64_t* words,
                                             const NormFinish& finish,
                                             int64_t differs, double* scalars) {
  const double raw = NormOfWords(words, NormPowerOf(finish.p));
  const double inverse = Over(1, finish.divisor);
  const double norm = Times(raw, inverse);
  const bool skip = finish.skip_on_overflow && !IsFinite(raw);
  const double clip = ClipCoefficientOnDevice(norm, finish.max_norm);
  const double nan = BitCast<double>(uint64_t{0x7ff8000000000000});
  scalars[kFactor] = OneNan(Times(inverse, clip));
  scalars[kSkip] = skip ? 1 : 0;
  scalars[kGradNorm] = OneNan(norm);
  scalars[kClippedNorm] = skip ? nan : OneNan(Times(norm, clip));
  scalars[kReplicasDiffer] = static_cast<double>(differs);
}

// ---- the same on a CPU

// Adds the blocks `begin`, `begin` + `step`, ... to the sum that `words` are,
// as one group of threads does.
template <NormPower kPower, typename T>
void AddToNormOnHost(const NormBatch<T>& batch, int64_t begin, int64_t step,
                     uint64_t* words) {
  DigitWindow window;
  const auto flush = [&] {
    for (int i = 0; i < DigitWindow::kDigits; ++i) {
      words[window.low + i] += window.digits[i];
    }
  };
  int at = 0;
  for (int64_t block = begin; block < batch.blocks(); block += step) {
    at = batch.SegmentOf(block, at);
    double lanes[kNormLanes];
    for (int lane = 0; lane < kNormLanes; ++lane) {
      lanes[lane] = LaneSum<kPower>(batch.segments[at],
                                    block - batch.first_block[at], lane);
    }
    const double sum = JoinLanesOnHost<kPower>(lanes);
    if (IsExtreme<kPower>(sum)) {
      const uint64_t bits = BitCast<uint64_t>(OneNan(sum));
      if (bits > words[kNormDigits]) words[kNormDigits] = bits;
      continue;
    }
    const SplitDouble split(sum);
    if (!window.Takes(split)) {
      flush();
      window = {};
      window.low = split.digit;
    }
    window.Add(split);
  }
  flush();
  CarryOnHost(words);
}

// DeviceKernels::FinishNorm. `all`: [ranks * kNormWords].
inline void FinishNormOnHost(const uint64_t* all, int64_t ranks,
                             const NormFinish& finish, double* scalars) {
  uint64_t first[kNormWords] = {};
  int64_t differs = 0;
  for (int64_t begin = 0; begin < ranks; begin += finish.group_size) {
    uint64_t words[kNormWords];
    for (int i = 0; i < kNormWords; ++i) {
      words[i] = WordOfGroup(all, begin, begin + finish.group_size, i);
    }
    CarryOnHost(words);
    if (begin == 0) memcpy(first, words, sizeof(first));
    if (differs == 0 && memcmp(first, words, sizeof(first)) != 0) {
      differs = begin + 1;
    }
  }
  WriteScalars(first, finish, differs, scalars);
}

}  // namespace tessera
#endif  // OPTIM_CUDA_NORM_MATH_H_
