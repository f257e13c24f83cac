// Arithmetic with one set of bits on CPU and GPU: each operation is rounded to
// nearest even, once; none is fused with another, whatever the compiler's
// flags, except MultiplyAdd. There is one NaN, which OneNan makes, since the
// bits of a NaN differ between processors.
#ifndef OPTIM_CUDA_ARITHMETIC_H_
#define OPTIM_CUDA_ARITHMETIC_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "optim/formulas/formula.h"  // TESSERA_HOST_DEVICE

namespace tessera {

// Reinterprets the bits of one type as another.
template <typename To, typename From>
TESSERA_HOST_DEVICE inline To BitCast(From from) {
  static_assert(sizeof(To) == sizeof(From), "as long");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Evaluates to `gpu` on a GPU, else to `cpu`.
#ifdef __CUDA_ARCH__
#define TESSERA_GPU_OR_CPU(gpu, cpu) return gpu
#else
#define TESSERA_GPU_OR_CPU(gpu, cpu) return cpu
#endif

TESSERA_HOST_DEVICE inline double Plus(double a, double b) {
  TESSERA_GPU_OR_CPU(__dadd_rn(a, b), a + b);
}
TESSERA_HOST_DEVICE inline double Minus(double a, double b) {
  TESSERA_GPU_OR_CPU(__dsub_rn(a, b), a - b);
}
TESSERA_HOST_DEVICE inline double Times(double a, double b) {
  TESSERA_GPU_OR_CPU(__dmul_rn(a, b), a * b);
}
TESSERA_HOST_DEVICE inline double Over(double a, double b) {
  TESSERA_GPU_OR_CPU(__ddiv_rn(a, b), a / b);
}
TESSERA_HOST_DEVICE inline double SquareRoot(double a) {
  TESSERA_GPU_OR_CPU(__dsqrt_rn(a), std::sqrt(a));
}

TESSERA_HOST_DEVICE inline float Plus(float a, float b) {
  TESSERA_GPU_OR_CPU(__fadd_rn(a, b), a + b);
}
TESSERA_HOST_DEVICE inline float Minus(float a, float b) {
  TESSERA_GPU_OR_CPU(__fsub_rn(a, b), a - b);
}
TESSERA_HOST_DEVICE inline float Times(float a, float b) {
  TESSERA_GPU_OR_CPU(__fmul_rn(a, b), a * b);
}
TESSERA_HOST_DEVICE inline float Over(float a, float b) {
  TESSERA_GPU_OR_CPU(__fdiv_rn(a, b), a / b);
}
TESSERA_HOST_DEVICE inline float SquareRoot(float a) {
  TESSERA_GPU_OR_CPU(__fsqrt_rn(a), std::sqrt(a));
}
// a * b + c, rounded once.
TESSERA_HOST_DEVICE inline float MultiplyAdd(float a, float b, float c) {
  TESSERA_GPU_OR_CPU(__fmaf_rn(a, b, c), std::fma(a, b, c));
}

TESSERA_HOST_DEVICE inline double MultiplyAdd(double a, double b, double c) {
  TESSERA_GPU_OR_CPU(__fma_rn(a, b, c), std::fma(a, b, c));
}

#undef TESSERA_GPU_OR_CPU

TESSERA_HOST_DEVICE inline double OneNan(double x) {
  return x == x ? x : BitCast<double>(uint64_t{0x7ff8000000000000});
}
TESSERA_HOST_DEVICE inline float OneNan(float x) {
  return x == x ? x : BitCast<float>(uint32_t{0x7fc00000});
}

TESSERA_HOST_DEVICE inline bool IsFinite(double x) {
  return (BitCast<uint64_t>(x) >> 52 & 0x7ff) != 0x7ff;
}

}  // namespace tessera
#endif  // OPTIM_CUDA_ARITHMETIC_H_
