#include "optim/norm/block_powers.h"

#include <algorithm>
#include <cmath>
#include <complex>

#include "ATen/Dispatch.h"
#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/ops/constant_pad_nd.h"
#include "ATen/ops/maximum.h"

namespace tessera {
namespace {

constexpr int kLanes = 8;
constexpr int64_t kBlocksPerThread = 512;  // at least: some 10 us
constexpr double kMaxProducts = 16;        // a greater whole p calls pow

// Elements of dtype T in a block.
template <typename T>
constexpr int64_t kElements = kNormBlock;
template <typename T>
constexpr int64_t kElements<c10::complex<T>> = kNormBlock / 2;

template <typename T>
double Magnitude(T x) {
  return std::fabs(static_cast<double>(x));
}
template <typename T>
double Magnitude(c10::complex<T> x) {
  // glibc's cabs is its hypot; a program with std::hypot needs glibc 2.35.
  return std::abs(std::complex<double>(x.real(), x.imag()));
}

bool TakesProducts(double p) { return p <= kMaxProducts && p == std::floor(p); }

struct Itself {
  double operator()(double x) const { return x; }
};
struct Square {
  double operator()(double x) const { return x * x; }
};
struct Products {
  int factors;
  double operator()(double x) const {
    double power = x;
    for (int i = 1; i < factors; ++i) power *= x;
    return power;
  }
};
struct AnyPower {
  double p;
  double operator()(double x) const { return std::pow(x, p); }
};

struct Plus {
  double operator()(double a, double b) const { return a + b; }
};
struct Greater {
  double operator()(double a, double b) const {
    return b > a || b != b ? b : a;
  }
};

// A tree over the 8 lanes.
template <typename T, typename Join>
T JoinLanes(const T* lane, Join join) {
  return join(join(join(lane[0], lane[1]), join(lane[2], lane[3])),
              join(join(lane[4], lane[5]), join(lane[6], lane[7])));
}

template <typename T, typename Power, typename Join>
double WholeBlock(const T* x, Power power, Join join) {
  double lane[kLanes] = {};
  for (int64_t i = 0; i < kElements<T>; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      lane[j] = join(lane[j], power(Magnitude(x[i + j])));
    }
  }
  return JoinLanes(lane, join);
}

// x[0] is element `head` of the first block.
template <typename T, typename Power, typename Join>
void AllBlocks(const T* x, int64_t numel, int64_t head, Power power, Join join,
               std::vector<double>* sums) {
  constexpr int64_t block = kElements<T>;
  const int64_t blocks = static_cast<int64_t>(sums->size());
  at::parallel_for(0, blocks, kBlocksPerThread, [&](int64_t b, int64_t end) {
    for (; b < end; ++b) {
      const int64_t from = b * block - head;
      if (from >= 0 && from + block <= numel) {
        (*sums)[b] = WholeBlock(x + from, power, join);
        continue;
      }
      // Absent elements are zeros, which change no lane.
      T padded[block] = {};
      const int64_t first = std::max<int64_t>(from, 0);
      std::copy(x + first, x + std::min(from + block, numel),
                padded + (first - from));
      (*sums)[b] = WholeBlock(padded, power, join);
    }
  });
}

template <typename T>
void AllBlocks(const T* x, int64_t numel, int64_t head, double p,
               std::vector<double>* sums) {
  if (std::isinf(p)) {
    AllBlocks(x, numel, head, Itself(), Greater(), sums);
  } else if (p == 1) {
    AllBlocks(x, numel, head, Itself(), Plus(), sums);
  } else if (p == 2) {
    AllBlocks(x, numel, head, Square(), Plus(), sums);
  } else if (TakesProducts(p)) {
    AllBlocks(x, numel, head, Products{static_cast<int>(p)}, Plus(), sums);
  } else {
    AllBlocks(x, numel, head, AnyPower{p}, Plus(), sums);
  }
}

// How a segment lies on the grid, in its dtype.
struct Place {
  Place(const at::Tensor& segment, int64_t first)
      : block(segment.is_complex() ? kNormBlock / 2 : kNormBlock),
        head(first % block),
        blocks((head + segment.numel() + block - 1) / block),
        tail(blocks * block - head - segment.numel()) {}
  int64_t block, head, blocks, tail;
};

at::Tensor Powers(const at::Tensor& magnitudes, double p) {
  if (std::isinf(p)) return magnitudes;
  if (!TakesProducts(p)) return magnitudes.pow(p);
  at::Tensor power = magnitudes;
  for (int i = 1; i < p; ++i) power = power * magnitudes;
  return power;
}

}  // namespace

std::vector<double> BlockPowers(const at::Tensor& segment, int64_t first,
                                double p) {
  const Place place(segment, first);
  std::vector<double> sums(place.blocks);
  AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES_AND2(
      at::kHalf, at::kBFloat16, segment.scalar_type(), "BlockPowers", [&] {
        AllBlocks(segment.const_data_ptr<scalar_t>(), segment.numel(),
                  place.head, p, &sums);
      });
  return sums;
}

at::Tensor BlockPowersByOperators(const at::Tensor& segment, int64_t first,
                                  double p) {
  const Place place(segment, first);
  const at::Tensor magnitudes =
      segment.to(segment.is_complex() ? at::kComplexDouble : at::kDouble).abs();
  const at::Tensor powers =
      at::constant_pad_nd(Powers(magnitudes, p), {place.head, place.tail})
          .view({place.blocks, place.block / kLanes, kLanes});
  const auto join = [p](const at::Tensor& a, const at::Tensor& b) {
    return std::isinf(p) ? at::maximum(a, b) : a + b;
  };
  at::Tensor lanes = powers.select(1, 0);
  for (int64_t i = 1; i < powers.size(1); ++i) {
    lanes = join(lanes, powers.select(1, i));
  }
  const std::vector<at::Tensor> lane = lanes.unbind(1);
  return JoinLanes(lane.data(), join);
}

}  // namespace tessera
