// The conformance suite: values and what is expected of them.
#include <cstring>
#include <map>
#include <sstream>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "tests/conformance_internal.h"
#include "torch/torch.h"

namespace tessera::conformance {
namespace {

at::Tensor MakeValues(const Case& one, int rank, int64_t numel, int salt) {
  std::vector<float> values(numel);
  const uint64_t seed =
      MixBits(static_cast<uint64_t>(rank) * 64 + salt + kMixStep) + kMixStep;
  static constexpr float kFactors[] = {1, 2, 1, 0.5};
  for (int64_t i = 0; i < numel; ++i) {
    const uint64_t hash = MixBits(seed + i);
    if (one.values == ConformanceValues::kRounding) {
      values[i] = (static_cast<float>(hash % 20011) - 10005.0f) *
                  (1.0f / static_cast<float>(1 << (hash >> 32) % 20));
    } else if (one.reduce == ReduceOp::PRODUCT) {
      values[i] = kFactors[hash % (at::isFloatingType(one.dtype) ? 4 : 3)];
    } else {
      values[i] = static_cast<float>(hash % 7);
      if (one.dtype != at::kByte) values[i] -= 3;
    }
  }
  at::Tensor t = torch::tensor(values, at::kFloat);
  if (one.dtype == at::kBool) return t > 0;
  if (!at::isComplexType(one.dtype)) return t.to(one.dtype);
  return torch::complex(t, t.flip(0) + 1).to(one.dtype);
}

at::Tensor Combine(const at::Tensor& a, const at::Tensor& b,
                   ReduceOp::RedOpType op) {
  const bool logical = a.scalar_type() == at::kBool;
  switch (op) {
    case ReduceOp::PRODUCT:
      return logical ? at::logical_and(a, b) : a * b;
    case ReduceOp::MIN:
      return at::minimum(a, b);
    case ReduceOp::MAX:
      return at::maximum(a, b);
    default:
      return logical ? at::logical_or(a, b) : a + b;
  }
}

}  // namespace

at::Tensor ValuesOf(const Case& one, int rank, int64_t numel, int salt) {
  using Kind = std::tuple<at::ScalarType, ConformanceValues, bool>;
  using Key = std::tuple<int, int64_t, int>;
  static Kind* const kind = new Kind;
  static auto* const kept = new std::map<Key, at::Tensor>;
  const Kind wanted(one.dtype, one.values, one.reduce == ReduceOp::PRODUCT);
  if (*kind != wanted) kept->clear();
  *kind = wanted;
  at::Tensor& values = (*kept)[Key(rank, numel, salt)];
  if (!values.defined()) values = MakeValues(one, rank, numel, salt);
  return values;
}

at::Tensor Reduced(const Case& one, const Tensors& in) {
  const bool is_16_bit = one.dtype == at::kHalf || one.dtype == at::kBFloat16;
  auto wide = [&](const at::Tensor& t) {
    return is_16_bit ? t.to(at::kFloat) : t;
  };
  at::Tensor sum = wide(in[0]);
  for (size_t r = 1; r < in.size(); ++r) {
    sum = Combine(sum, wide(in[r]), one.reduce);
  }
  if (one.reduce == ReduceOp::AVG && one.dtype != at::kBool) {
    const auto count = static_cast<int64_t>(in.size());
    if (at::isComplexType(one.dtype)) {
      sum = at::view_as_complex(at::view_as_real(sum) / count);
    } else {
      sum = at::isIntegralType(one.dtype, /*includeBool=*/false)
                ? at::div(sum, count, "trunc")
                : sum / count;
    }
  }
  return sum.to(one.dtype);
}

at::Tensor Empty(const Case& one, int64_t numel) {
  const auto options = at::TensorOptions().dtype(one.dtype).device(one.device);
  return one.contiguous ? torch::zeros({numel}, options)
                        : torch::zeros({numel, 2}, options).select(1, 1);
}

at::Tensor Place(const Case& one, const at::Tensor& values) {
  at::Tensor t = Empty(one, values.numel());
  t.copy_(values);
  return t;
}

std::string Compare(const at::Tensor& got, const at::Tensor& want,
                    const std::string& where) {
  const at::Tensor a = got.cpu().contiguous(), b = want.contiguous();
  if (a.numel() != b.numel() || a.scalar_type() != b.scalar_type()) {
    return absl::StrCat(where, ": another shape or dtype");
  }
  if (a.numel() == 0 ||
      std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0) {
    return "";
  }
  const int64_t each = a.element_size();
  const auto* x = static_cast<const char*>(a.const_data_ptr());
  const auto* y = static_cast<const char*>(b.const_data_ptr());
  int64_t at = 0;
  while (std::memcmp(x + at * each, y + at * each, each) == 0) ++at;
  std::ostringstream text;
  text << where << ": element " << at << " is " << a[at].item() << ", expected "
       << b[at].item();
  return text.str();
}

std::string CompareAll(const Tensors& got, const Tensors& want) {
  for (size_t i = 0; i < got.size(); ++i) {
    const std::string wrong =
        Compare(got[i], want[i], absl::StrCat("output ", i));
    if (!wrong.empty()) return wrong;
  }
  return "";
}

}  // namespace tessera::conformance
