// Several vectors that are processed together. A formula has a root and
// divisions one after the other, of 70 cycles in all, and a processor looks
// ahead only so far: in the order of a program it meets other vectors' within
// that. Only step_loops.cc includes it, as vectors.h.
#ifndef OPTIM_KERNELS_WIDE_H_
#define OPTIM_KERNELS_WIDE_H_

#include "optim/kernels/vectors.h"

namespace tessera::TESSERA_STEP_ISA {
namespace {

constexpr int kWide = 4;  // as codes of 8 bits are packed
struct Wide {
  static Wide Of(float all) {
    Wide wide;
    for (Vector& v : wide.v) v = Vector::Of(all);
    return wide;
  }
  Vector v[kWide];
};

inline Vector At(Vector a, int) { return a; }
inline Vector At(const Wide& a, int i) { return a.v[i]; }

// Defines an operator on Wides, or on a Wide and one Vector that stands for
// all.
#define TESSERA_WIDE_OPERATOR(op, A, B)                               \
  inline Wide operator op(const A& a, const B& b) {                   \
    Wide wide;                                                        \
    for (int i = 0; i < kWide; ++i) wide.v[i] = At(a, i) op At(b, i); \
    return wide;                                                      \
  }
#define TESSERA_WIDE_OPERATORS(A, B) \
  TESSERA_WIDE_OPERATOR(+, A, B)     \
  TESSERA_WIDE_OPERATOR(-, A, B)     \
  TESSERA_WIDE_OPERATOR(*, A, B)     \
  TESSERA_WIDE_OPERATOR(/, A, B)
TESSERA_WIDE_OPERATORS(Wide, Wide)
TESSERA_WIDE_OPERATORS(Wide, Vector)
TESSERA_WIDE_OPERATORS(Vector, Wide)
#undef TESSERA_WIDE_OPERATORS
#undef TESSERA_WIDE_OPERATOR

template <typename A, typename B, typename C>
inline Wide MultiplyAdd(const A& a, const B& b, const C& c) {
  Wide wide;
  for (int i = 0; i < kWide; ++i) {
    wide.v[i] = MultiplyAdd(At(a, i), At(b, i), At(c, i));
  }
  return wide;
}
inline Wide SquareRoot(Wide a) {
  for (Vector& v : a.v) v = SquareRoot(v);
  return a;
}
inline Wide OneNan(Wide a) {
  for (Vector& v : a.v) v = OneNan(v);
  return a;
}
inline Wide Sign(Wide a) {
  for (Vector& v : a.v) v = Sign(v);
  return a;
}
inline Wide Max(const Wide& a, const Wide& b) {
  Wide wide;
  for (int i = 0; i < kWide; ++i) wide.v[i] = Max(a.v[i], b.v[i]);
  return wide;
}

}  // namespace
}  // namespace tessera::TESSERA_STEP_ISA
#endif  // OPTIM_KERNELS_WIDE_H_
