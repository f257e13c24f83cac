#include "tests/conformance.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <sstream>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "torch/torch.h"

namespace tessera {
namespace {

using Backend = c10d::Backend;
using Case = ConformanceCase;
using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;

// ---- values and references

uint64_t Mix(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

at::Tensor MakeValues(const Case& one, int rank, int64_t numel, int salt) {
  std::vector<float> values(numel);
  const uint64_t seed = Mix(static_cast<uint64_t>(rank) * 64 + salt);
  static constexpr float kFactors[] = {1, 2, 1, 0.5};
  for (int64_t i = 0; i < numel; ++i) {
    const uint64_t hash = Mix(seed + i);
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

// What rank `rank` contributes: `numel` elements, not to be written; `salt`
// tells its tensors apart. Kept while the dtype and the kind of values stay.
at::Tensor ValuesOf(const Case& one, int rank, int64_t numel, int salt = 0) {
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

// In rank order; 16-bit types in float32, rounded once.
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

// ---- tensors of the layout that is asked for

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

// ---- operations. Each returns what was wrong, "" if nothing was.

struct Setting {
  Backend& backend;
  const Case& one;
  int rank, size, root;

  Tensors All(int64_t numel, int salt = 0) const {
    Tensors all;
    for (int r = 0; r < size; ++r) {
      all.push_back(ValuesOf(one, r, numel, salt));
    }
    return all;
  }
  at::Tensor Mine(int64_t numel, int salt = 0) const {
    return Place(one, ValuesOf(one, rank, numel, salt));
  }
  Tensors Places(int64_t numel) const {
    Tensors places;
    for (int r = 0; r < size; ++r) places.push_back(Empty(one, numel));
    return places;
  }
  // Rank `from`'s tensor for rank `to`.
  at::Tensor Between(int from, int to, int64_t numel) const {
    return ValuesOf(one, from, numel, 1 + to);
  }
  // Those that rank r contributes to each rank.
  Tensors Rows(int r, int64_t numel) const {
    Tensors rows;
    for (int to = 0; to < size; ++to) rows.push_back(Between(r, to, numel));
    return rows;
  }
  // Those that this rank gets.
  Tensors Column(int64_t numel) const {
    Tensors column;
    for (int from = 0; from < size; ++from) {
      column.push_back(Between(from, rank, numel));
    }
    return column;
  }
  Tensors Placed(const Tensors& values) const {
    Tensors placed;
    for (const at::Tensor& t : values) placed.push_back(Place(one, t));
    return placed;
  }
};

std::string Broadcast(const Setting& s) {
  Tensors t{s.Mine(s.one.numel)};
  c10d::BroadcastOptions options;
  options.rootRank = s.root;
  s.backend.broadcast(t, options)->wait();
  return Compare(t[0], ValuesOf(s.one, s.root, s.one.numel), "output");
}

std::string AllReduce(const Setting& s) {
  Tensors t{s.Mine(s.one.numel)};
  c10d::AllreduceOptions options;
  options.reduceOp = s.one.reduce;
  s.backend.allreduce(t, options)->wait();
  return Compare(t[0], Reduced(s.one, s.All(s.one.numel)), "output");
}

std::string AllReduceCoalesced(const Setting& s) {
  Tensors t{s.Mine(s.one.numel, 0), s.Mine(s.one.numel + 3, 1)};
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = s.one.reduce;
  s.backend.allreduce_coalesced(t, options)->wait();
  return CompareAll(t, {Reduced(s.one, s.All(s.one.numel, 0)),
                        Reduced(s.one, s.All(s.one.numel + 3, 1))});
}

std::string Reduce(const Setting& s) {
  Tensors t{s.Mine(s.one.numel)};
  c10d::ReduceOptions options;
  options.reduceOp = s.one.reduce;
  options.rootRank = s.root;
  s.backend.reduce(t, options)->wait();
  // What the others' tensors hold is not defined.
  if (s.rank != s.root) return "";
  return Compare(t[0], Reduced(s.one, s.All(s.one.numel)), "output");
}

std::string AllGather(const Setting& s) {
  Tensors in{s.Mine(s.one.numel)};
  std::vector<Tensors> out{s.Places(s.one.numel)};
  s.backend.allgather(out, in)->wait();
  return CompareAll(out[0], s.All(s.one.numel));
}

std::string AllGatherBase(const Setting& s) {
  at::Tensor in = s.Mine(s.one.numel);
  at::Tensor out = torch::zeros({s.size * s.one.numel}, in.options());
  s.backend._allgather_base(out, in)->wait();
  return Compare(out, torch::cat(s.All(s.one.numel)), "output");
}

std::string AllGatherCoalesced(const Setting& s) {
  Tensors in{s.Mine(s.one.numel, 0), s.Mine(s.one.numel + 3, 1)};
  std::vector<Tensors> out;
  for (int r = 0; r < s.size; ++r) {
    out.push_back({Empty(s.one, s.one.numel), Empty(s.one, s.one.numel + 3)});
  }
  s.backend.allgather_coalesced(out, in)->wait();
  for (int r = 0; r < s.size; ++r) {
    const std::string wrong =
        CompareAll(out[r], {ValuesOf(s.one, r, s.one.numel, 0),
                            ValuesOf(s.one, r, s.one.numel + 3, 1)});
    if (!wrong.empty()) return absl::StrCat("of rank ", r, ", ", wrong);
  }
  return "";
}

std::string AllGatherIntoTensorCoalesced(const Setting& s) {
  Tensors in{s.Mine(s.one.numel, 0), s.Mine(s.one.numel + 3, 1)};
  Tensors out;
  for (const at::Tensor& t : in) {
    out.push_back(torch::zeros({s.size * t.numel()}, t.options()));
  }
  s.backend.allgather_into_tensor_coalesced(out, in)->wait();
  return CompareAll(out, {torch::cat(s.All(s.one.numel, 0)),
                          torch::cat(s.All(s.one.numel + 3, 1))});
}

std::string Gather(const Setting& s) {
  Tensors in{s.Mine(s.one.numel)};
  std::vector<Tensors> out;
  if (s.rank == s.root) out.push_back(s.Places(s.one.numel));
  c10d::GatherOptions options;
  options.rootRank = s.root;
  s.backend.gather(out, in, options)->wait();
  return s.rank == s.root ? CompareAll(out[0], s.All(s.one.numel)) : "";
}

std::string Scatter(const Setting& s) {
  Tensors out{Empty(s.one, s.one.numel)};
  std::vector<Tensors> in;
  if (s.rank == s.root) in.push_back(s.Placed(s.Rows(s.root, s.one.numel)));
  c10d::ScatterOptions options;
  options.rootRank = s.root;
  s.backend.scatter(out, in, options)->wait();
  return Compare(out[0], s.Between(s.root, s.rank, s.one.numel), "output");
}

std::string ReduceScatter(const Setting& s) {
  Tensors out{Empty(s.one, s.one.numel)};
  std::vector<Tensors> in{s.Placed(s.Rows(s.rank, s.one.numel))};
  c10d::ReduceScatterOptions options;
  options.reduceOp = s.one.reduce;
  s.backend.reduce_scatter(out, in, options)->wait();
  return Compare(out[0], Reduced(s.one, s.Column(s.one.numel)), "output");
}

std::string ReduceScatterBase(const Setting& s) {
  at::Tensor out = Empty(s.one, s.one.numel);
  at::Tensor in = Place(s.one, torch::cat(s.Rows(s.rank, s.one.numel)));
  c10d::ReduceScatterOptions options;
  options.reduceOp = s.one.reduce;
  s.backend._reduce_scatter_base(out, in, options)->wait();
  return Compare(out, Reduced(s.one, s.Column(s.one.numel)), "output");
}

std::string ReduceScatterTensorCoalesced(const Setting& s) {
  Tensors out, in;
  for (int64_t numel : {s.one.numel, s.one.numel + 3}) {
    out.push_back(Empty(s.one, numel));
    in.push_back(Place(s.one, torch::cat(s.Rows(s.rank, numel))));
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = s.one.reduce;
  s.backend.reduce_scatter_tensor_coalesced(out, in, options)->wait();
  return CompareAll(out, {Reduced(s.one, s.Column(s.one.numel)),
                          Reduced(s.one, s.Column(s.one.numel + 3))});
}

std::string AllToAll(const Setting& s) {
  Tensors in = s.Placed(s.Rows(s.rank, s.one.numel));
  Tensors out = s.Places(s.one.numel);
  s.backend.alltoall(out, in)->wait();
  return CompareAll(out, s.Column(s.one.numel));
}

std::string AllToAllBase(const Setting& s) {
  at::Tensor in = Place(s.one, torch::cat(s.Rows(s.rank, s.one.numel)));
  at::Tensor out = Empty(s.one, s.size * s.one.numel);
  std::vector<int64_t> even;
  s.backend.alltoall_base(out, in, even, even)->wait();
  return Compare(out, torch::cat(s.Column(s.one.numel)), "output");
}

// Rank r has numel + (r + 2 p) % 3 elements for rank p.
std::string AllToAllUneven(const Setting& s) {
  auto length = [&](int from, int to) {
    return s.one.numel + (from + 2 * to) % 3;
  };
  Tensors rows, column;
  std::vector<int64_t> sends, receives;
  for (int p = 0; p < s.size; ++p) {
    sends.push_back(length(s.rank, p));
    receives.push_back(length(p, s.rank));
    rows.push_back(s.Between(s.rank, p, sends.back()));
    column.push_back(s.Between(p, s.rank, receives.back()));
  }
  at::Tensor in = Place(s.one, torch::cat(rows));
  const at::Tensor want = torch::cat(column);
  at::Tensor out = Empty(s.one, want.numel());
  s.backend.alltoall_base(out, in, receives, sends)->wait();
  return Compare(out, want, "output");
}

// To the next rank and from the one before; two messages that are received in
// the other order.
std::string SendReceive(const Setting& s) {
  const int next = (s.rank + 1) % s.size;
  const int previous = (s.rank + s.size - 1) % s.size;
  Tensors out[2] = {{s.Mine(s.one.numel, 0)}, {s.Mine(s.one.numel, 1)}};
  Tensors in[2] = {{Empty(s.one, s.one.numel)}, {Empty(s.one, s.one.numel)}};
  auto send_0 = s.backend.send(out[0], next, 10);
  auto send_1 = s.backend.send(out[1], next, 11);
  auto receive_1 = s.backend.recv(in[1], previous, 11);
  auto receive_0 = s.backend.recv(in[0], previous, 10);
  for (const auto& work : {receive_0, receive_1, send_0, send_1}) work->wait();
  return CompareAll({in[0][0], in[1][0]},
                    {ValuesOf(s.one, previous, s.one.numel, 0),
                     ValuesOf(s.one, previous, s.one.numel, 1)});
}

// Everyone sends to the root, which does not know who comes first.
std::string ReceiveAnySource(const Setting& s) {
  // The messages of the next case may come before the last ones of this.
  static int tag = 100;
  ++tag;
  if (s.rank != s.root) {
    Tensors out{s.Mine(s.one.numel)};
    s.backend.send(out, s.root, tag)->wait();
    return "";
  }
  std::vector<bool> seen(s.size);
  for (int i = 1; i < s.size; ++i) {
    Tensors in{Empty(s.one, s.one.numel)};
    auto work = s.backend.recvAnysource(in, tag);
    work->wait();
    const int from = work->sourceRank();
    if (from < 0 || from >= s.size || from == s.rank || seen[from]) {
      return absl::StrCat("receive ", i, " is from rank ", from);
    }
    seen[from] = true;
    const std::string wrong =
        Compare(in[0], ValuesOf(s.one, from, s.one.numel), "received");
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string Barrier(const Setting& s) {
  s.backend.barrier()->wait();
  return "";
}

struct Op {
  const char* name;
  std::string (*run)(const Setting&);
  bool reduces = false;
};

constexpr Op kOps[] = {
    {"broadcast", Broadcast},
    {"all_reduce", AllReduce, true},
    {"all_reduce_coalesced", AllReduceCoalesced, true},
    {"reduce", Reduce, true},
    {"all_gather", AllGather},
    {"all_gather_base", AllGatherBase},
    {"all_gather_coalesced", AllGatherCoalesced},
    {"all_gather_into_tensor_coalesced", AllGatherIntoTensorCoalesced},
    {"gather", Gather},
    {"scatter", Scatter},
    {"reduce_scatter", ReduceScatter, true},
    {"reduce_scatter_base", ReduceScatterBase, true},
    {"reduce_scatter_tensor_coalesced", ReduceScatterTensorCoalesced, true},
    {"all_to_all", AllToAll},
    {"all_to_all_base", AllToAllBase},
    {"all_to_all_uneven", AllToAllUneven},
    {"send_receive", SendReceive},
    {"receive_any_source", ReceiveAnySource},
    {"barrier", Barrier},
};

const Op& OpOf(const std::string& name) {
  const auto* op = std::find_if(std::begin(kOps), std::end(kOps),
                                [&](const Op& o) { return o.name == name; });
  TORCH_CHECK(op != std::end(kOps), "no operation ", name);
  return *op;
}

}  // namespace

std::string ConformanceCase::Cell() const {
  static constexpr const char* kReduce[] = {"sum", "avg", "product", "min",
                                            "max"};
  return absl::StrCat(op, " ", c10::toString(dtype),
                      reduce <= ReduceOp::MAX
                          ? absl::StrCat(" ", kReduce[static_cast<int>(reduce)])
                          : "",
                      contiguous ? "" : " strided");
}

namespace {

bool Exists(const Op& op, const Case& cell) {
  if (op.run == Barrier && cell.dtype != at::kFloat) return false;
  if (!op.reduces) {
    return cell.reduce == ReduceOp::UNUSED &&
           cell.values == ConformanceValues::kExact;
  }
  // Complex numbers have no order, and c10d no product of them.
  return cell.reduce != ReduceOp::UNUSED &&
         (!at::isComplexType(cell.dtype) || cell.reduce == ReduceOp::SUM ||
          cell.reduce == ReduceOp::AVG);
}

}  // namespace

std::vector<ConformanceCase> ConformanceCells(ConformanceValues values,
                                              ConformanceLimits limits) {
  std::vector<at::ScalarType> dtypes = {at::kFloat, at::kDouble, at::kHalf,
                                        at::kBFloat16, at::kComplexFloat};
  if (values == ConformanceValues::kExact) {
    for (at::ScalarType type :
         {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong}) {
      dtypes.push_back(type);
    }
  }
  constexpr ReduceOp::RedOpType kReduces[] = {
      ReduceOp::UNUSED, ReduceOp::SUM, ReduceOp::AVG,
      ReduceOp::MIN,    ReduceOp::MAX, ReduceOp::PRODUCT};
  std::vector<Case> cells;
  // Operations last: they share their values.
  for (at::ScalarType dtype : dtypes) {
    for (ReduceOp::RedOpType reduce : kReduces) {
      for (const Op& op : kOps) {
        for (bool contiguous : {true, false}) {
          const Case cell = {op.name, dtype,  reduce,       contiguous,
                             0,       values, limits.device};
          if (Exists(op, cell) && (contiguous || limits.strided)) {
            cells.push_back(cell);
          }
        }
      }
    }
  }
  return cells;
}

std::string RunConformanceCase(c10d::Backend& backend,
                               const ConformanceCase& one) {
  const int size = backend.getSize();
  return OpOf(one.op).run({backend, one, backend.getRank(), size,
                           static_cast<int>(one.numel % size)});
}

ConformanceReport RunConformance(c10d::Backend& backend,
                                 ConformanceValues values,
                                 ConformanceLimits limits) {
  constexpr int64_t kPrime = 10007, kMiB = 1 << 20;
  constexpr size_t kToldInFull = 5;
  const int64_t size = backend.getSize();
  ConformanceReport report;
  for (Case cell : ConformanceCells(values, limits)) {
    const int64_t big = kMiB / c10::elementSize(cell.dtype) + 1;
    std::set<int64_t> sizes = {1, 0, size - 1, size + 1, kPrime, big};
    if (cell.op == "receive_any_source" && !limits.empty_from_any) {
      sizes.erase(0);
    }
    size_t refused = 0;
    std::string said;
    for (int64_t numel : sizes) {
      cell.numel = numel;
      std::string wrong;
      try {
        wrong = RunConformanceCase(backend, cell);
      } catch (const std::exception& error) {
        ++refused;
        said = error.what();
        continue;
      }
      if (wrong.empty()) {
        ++report.passed;
        continue;
      }
      report.wrong_cells.insert(cell.Cell());
      if (report.failures.size() >= kToldInFull) continue;
      report.failures.push_back(
          absl::StrCat(cell.Cell(), ", ", numel, " elements: ", wrong));
    }
    if (refused == sizes.size()) {
      report.refused_cells.insert(cell.Cell());
    } else if (refused > 0) {
      report.wrong_cells.insert(cell.Cell());
      report.failures.push_back(absl::StrCat(cell.Cell(), ": refused at ",
                                             refused, " of ", sizes.size(),
                                             " sizes: ", said));
    }
  }
  return report;
}

}  // namespace tessera
