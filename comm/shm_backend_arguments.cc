#include "comm/shm_backend_arguments.h"

#include "ATen/ops/cat.h"
#include "absl/strings/str_cat.h"
#include "comm/element_type.h"

namespace tessera {

void CheckArgument(bool ok, const char* op, const std::string& what) {
  TORCH_CHECK(ok, "shm ", op, ": ", what);
}

void CheckTensor(const char* op, const at::Tensor& t) {
  CheckArgument(t.defined(), op, "a tensor is undefined");
  CheckArgument(
      t.is_cpu() && t.layout() == at::kStrided, op,
      absl::StrCat("expected dense CPU tensors, got one of ", t.toString()));
}

void CheckTensors(const char* op, const char* name, const Tensors& tensors,
                  size_t count) {
  CheckArgument(
      tensors.size() == count, op,
      absl::StrCat("expected ", count, " ", name, ", got ", tensors.size()));
  for (const at::Tensor& t : tensors) {
    CheckTensor(op, t);
    CheckArgument(t.scalar_type() == tensors[0].scalar_type(), op,
                  absl::StrCat(name, " differ in dtype"));
  }
}

void CheckAlike(const char* op, const at::Tensor& a, const at::Tensor& b,
                int64_t times) {
  CheckArgument(
      a.scalar_type() == b.scalar_type() && a.numel() == times * b.numel(), op,
      absl::StrCat("expected ", times * b.numel(), " elements of ",
                   c10::toString(b.scalar_type()), ", got ", a.numel(), " of ",
                   c10::toString(a.scalar_type())));
}

void CheckRoot(const char* op, int64_t root, int size) {
  CheckArgument(
      root >= 0 && root < size, op,
      absl::StrCat("expected a root of 0 to ", size - 1, ", got ", root));
}

Reduction ReductionOf(const char* op, const c10d::ReduceOp& reduce,
                      at::ScalarType type) {
  Reduction result;
  switch (reduce) {
    case c10d::ReduceOp::SUM:
      result.op = shm::ReduceOp::kSum;
      break;
    case c10d::ReduceOp::AVG:
      result.op = shm::ReduceOp::kAverage;
      break;
    case c10d::ReduceOp::MIN:
      result.op = shm::ReduceOp::kMin;
      break;
    case c10d::ReduceOp::MAX:
      result.op = shm::ReduceOp::kMax;
      break;
    case c10d::ReduceOp::PRODUCT:
      result.op = shm::ReduceOp::kProduct;
      break;
    default:
      CheckArgument(false, op, "expected SUM, AVG, MIN, MAX or PRODUCT");
  }
  result.name = shm::ReduceOpName(result.op);
  if (c10::isComplexType(type) && (result.op == shm::ReduceOp::kSum ||
                                   result.op == shm::ReduceOp::kAverage)) {
    type = c10::toRealValueType(type);
    result.parts = 2;
  }
  const auto element = ElementTypeOf(type);
  CheckArgument(element.ok(), op, std::string(element.status().message()));
  result.type = *element;
  return result;
}

void CheckApart(const char* op, const Tensors& parts, const at::Tensor& t,
                int own) {
  if (!IsPlain(t)) return;
  const auto begin = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  for (size_t i = 0; i < parts.size(); ++i) {
    if (!IsPlain(parts[i]) || parts[i].numel() == 0 || t.numel() == 0) continue;
    const auto part = reinterpret_cast<uintptr_t>(parts[i].const_data_ptr());
    const bool apart =
        part + parts[i].nbytes() <= begin || begin + t.nbytes() <= part;
    const bool is_own = static_cast<int>(i) == own && part == begin;
    CheckArgument(apart || is_own, op,
                  "an input and an output overlap, other than as this rank's "
                  "own part");
  }
}

bool IsPlain(const at::Tensor& t) {
  return t.is_contiguous() && !t.is_conj() && !t.is_neg();
}

at::Tensor Plain(const at::Tensor& t) {
  return t.resolve_conj().resolve_neg().contiguous();
}

Tensors PartsOf(const at::Tensor& t, int count) {
  Tensors parts;
  const at::Tensor flat = t.view({-1});
  const int64_t each = flat.numel() / count;
  for (int i = 0; i < count; ++i)
    parts.push_back(flat.narrow(0, i * each, each));
  return parts;
}

Tensors SplitsOf(const char* name, const at::Tensor& t,
                 const std::vector<int64_t>& splits, int count) {
  CheckArgument(t.dim() > 0, "all-to-all", "expected tensors with a dimension");
  std::vector<int64_t> lengths = splits;
  if (lengths.empty()) {
    CheckArgument(t.size(0) % count == 0, "all-to-all",
                  absl::StrCat("expected a first dimension that ", count,
                               " divides for ", name, ", got ", t.size(0)));
    lengths.assign(count, t.size(0) / count);
  }
  CheckArgument(lengths.size() == static_cast<size_t>(count), "all-to-all",
                absl::StrCat("expected ", count, " splits of ", name, ", got ",
                             lengths.size()));
  Tensors parts;
  int64_t at = 0;
  for (int64_t length : lengths) {
    CheckArgument(
        length >= 0 && at + length <= t.size(0), "all-to-all",
        absl::StrCat("the splits of ", name, " do not fit ", t.size(0)));
    parts.push_back(t.narrow(0, at, length));
    at += length;
  }
  CheckArgument(at == t.size(0), "all-to-all",
                absl::StrCat("the splits of ", name, " are ", at,
                             " in all, expected ", t.size(0)));
  return parts;
}

int64_t Bytes(const at::Tensor& t) { return static_cast<int64_t>(t.nbytes()); }

at::Tensor Joined(const Tensors& tensors) {
  bool apart = false;
  const char* end = static_cast<const char*>(tensors[0].const_data_ptr());
  for (const at::Tensor& t : tensors) {
    apart |= !IsPlain(t) || (t.numel() > 0 && t.const_data_ptr() != end);
    end += t.nbytes();
  }
  if (!apart) return tensors[0];
  Tensors flat;
  for (const at::Tensor& t : tensors) flat.push_back(Plain(t).view({-1}));
  return at::cat(flat);
}

}  // namespace tessera
