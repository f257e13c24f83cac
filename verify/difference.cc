#include "verify/difference.h"

#include <torch/torch.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"

namespace tessera {
namespace {

std::string Describe(const at::Tensor& t) {
  if (!t.defined()) return "none";
  std::ostringstream out;
  out << t.scalar_type() << " " << t.sizes();
  return out.str();
}

// Returns real numbers in order of indices.
at::Tensor InReals(const at::Tensor& t) {
  const at::Tensor plain = t.detach().cpu().resolve_conj().contiguous();
  return plain.is_complex() ? at::view_as_real(plain) : plain;
}

at::Tensor Bits(const at::Tensor& t) {
  return t.reshape({-1}).view(t.element_size() == 8   ? at::kLong
                              : t.element_size() == 4 ? at::kInt
                              : t.element_size() == 2 ? at::kShort
                                                      : at::kChar);
}

// Returns the indices of element number `flat`.
std::string IndexOf(int64_t flat, at::IntArrayRef sizes) {
  std::vector<int64_t> index;
  for (size_t d = sizes.size(); d-- > 0;) {
    index.push_back(flat % sizes[d]);
    flat /= sizes[d];
  }
  std::reverse(index.begin(), index.end());
  return absl::StrCat("[", absl::StrJoin(index, ", "), "]");
}

std::string ValueAt(const at::Tensor& reals, int64_t flat) {
  const double value = reals.reshape({-1})[flat].to(at::kDouble).item<double>();
  return absl::StrCat(HexFloat(value), " (", value, ")");
}

std::string FirstOf(const at::Tensor& differ, const at::Tensor& expected,
                    const at::Tensor& got, absl::string_view more) {
  const int64_t count = differ.sum().item<int64_t>();
  if (count == 0) return "";
  const int64_t first = differ.nonzero()[0].item<int64_t>();
  return absl::StrCat("element ", IndexOf(first, expected.sizes()), " is ",
                      ValueAt(got, first), ", plain training has ",
                      ValueAt(expected, first), more, "; ", count, " of ",
                      differ.numel(), " elements differ");
}

}  // namespace

std::string DifferenceOf(const at::Tensor& expected, const at::Tensor& got) {
  torch::NoGradGuard no_grad;
  if (!expected.defined() && !got.defined()) return "";
  if (Describe(expected) != Describe(got)) {
    return absl::StrCat("it is ", Describe(got), ", plain training has ",
                        Describe(expected));
  }
  const at::Tensor a = InReals(expected), b = InReals(got);
  const at::Tensor both_nan =
      a.reshape({-1}).isnan().logical_and(b.reshape({-1}).isnan());
  return FirstOf(Bits(a).ne(Bits(b)).logical_and(both_nan.logical_not()), a, b,
                 "");
}

std::string DifferenceBeyond(const at::Tensor& expected, const at::Tensor& got,
                             const at::Tensor& rounding, int64_t additions) {
  torch::NoGradGuard no_grad;
  if (Describe(expected) != Describe(got)) return DifferenceOf(expected, got);
  const at::Tensor a = InReals(expected), b = InReals(got);
  const at::Tensor bound =
      InReals(rounding).mul(static_cast<double>(additions));
  const at::Tensor off = a.to(at::kDouble).sub(b.to(at::kDouble)).abs();
  // The test is "not within", so that it finds NaN.
  return FirstOf(off.le(bound).logical_not().reshape({-1}), a, b,
                 ", further apart than sums in another order can be");
}

std::string PrintOfValues(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  torch::NoGradGuard no_grad;
  const at::Tensor host = tensor.detach().cpu().contiguous();
  return absl::StrCat(
      Describe(tensor), " ",
      absl::Hex(Fingerprint(host.const_data_ptr(),
                            static_cast<int64_t>(host.nbytes()))));
}

std::string FirstLineThatDiffers(absl::string_view expected,
                                 absl::string_view got) {
  const std::vector<absl::string_view> a = absl::StrSplit(expected, '\n');
  const std::vector<absl::string_view> b = absl::StrSplit(got, '\n');
  for (size_t i = 0; i < std::max(a.size(), b.size()); ++i) {
    const absl::string_view mine = i < a.size() ? a[i] : "nothing";
    const absl::string_view theirs = i < b.size() ? b[i] : "nothing";
    if (mine == theirs) continue;
    return absl::StrCat("expected ", mine, ", got ", theirs);
  }
  return "";
}

}  // namespace tessera
