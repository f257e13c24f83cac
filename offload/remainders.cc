#include "offload/remainders.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ATen/ops/empty.h"

namespace tessera {
namespace {

// Elements of which copies are made at a time.
constexpr int64_t kAtOnce = 1 << 20;

// The bits of float32 masters, with one NaN. On the device of `like`.
at::Tensor BitsOf(const at::Tensor& masters, const at::Tensor& like) {
  const at::Tensor wide = masters.to(like.device(), at::kFloat);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  return wide.masked_fill(wide.ne(wide), nan).view(at::kInt);
}

void SetUpperBits(const at::Tensor& bits, const at::Tensor& working) {
  working.view(at::kShort).copy_(bits.add(0x8000).bitwise_right_shift_(16));
}

template <typename Visit>
void VisitPieces(int64_t numel, const Visit& visit) {
  for (int64_t begin = 0; begin < numel; begin += kAtOnce) {
    const int64_t n = std::min(kAtOnce, numel - begin);
    visit([begin, n](const at::Tensor& t) { return t.narrow(0, begin, n); });
  }
}

}  // namespace

at::Tensor RoundTiesAway(const at::Tensor& values) {
  const at::Tensor working =
      at::empty(values.sizes(), values.options().dtype(at::kBFloat16));
  VisitPieces(values.numel(), [&](const auto& piece_of) {
    SetUpperBits(BitsOf(piece_of(values), values), piece_of(working));
  });
  return working;
}

void SplitMasters(const at::Tensor& masters, const at::Tensor& working,
                  const at::Tensor& remainders) {
  VisitPieces(masters.numel(), [&](const auto& piece_of) {
    const at::Tensor bits = BitsOf(piece_of(masters), working);
    SetUpperBits(bits, piece_of(working));
    piece_of(remainders).copy_(bits);  // the lower half of each
  });
}

void JoinMasters(const at::Tensor& working, const at::Tensor& remainders,
                 const at::Tensor& masters) {
  const at::Tensor bits = masters.view(at::kInt);
  bits.copy_(working.view(at::kShort));
  bits.bitwise_left_shift_(16).add_(remainders);
}

}  // namespace tessera
