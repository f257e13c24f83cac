// The conformance suite: operations.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/conformance_internal.h"
#include "torch/torch.h"

namespace tessera {
namespace conformance {

struct Setting {
  c10d::Backend& backend;
  const Case& one;
  int rank, size, root;
  int64_t numel = one.numel;

  // By rank.
  template <typename TensorOf>
  Tensors ForEach(TensorOf of) const {
    Tensors all;
    for (int r = 0; r < size; ++r) all.push_back(of(r));
    return all;
  }
  Tensors All(int64_t numel, int salt = 0) const {
    return ForEach([&](int r) { return ValuesOf(one, r, numel, salt); });
  }
  at::Tensor Mine(int64_t numel, int salt = 0) const {
    return Place(one, ValuesOf(one, rank, numel, salt));
  }
  Tensors Places(int64_t numel) const {
    return ForEach([&](int) { return Empty(one, numel); });
  }
  // Rank `from`'s tensor for rank `to`.
  at::Tensor Between(int from, int to, int64_t numel) const {
    return ValuesOf(one, from, numel, 1 + to);
  }
  // Those that rank r contributes to each rank.
  Tensors Rows(int r, int64_t numel) const {
    return ForEach([&](int to) { return Between(r, to, numel); });
  }
  // Those that this rank gets.
  Tensors Column(int64_t numel) const {
    return ForEach([&](int from) { return Between(from, rank, numel); });
  }
  Tensors Placed(const Tensors& values) const {
    return ForEach([&](int r) { return Place(one, values[r]); });
  }
};

namespace {

std::string Broadcast(const Setting& s) {
  Tensors t{s.Mine(s.numel)};
  c10d::BroadcastOptions options;
  options.rootRank = s.root;
  s.backend.broadcast(t, options)->wait();
  return Compare(t[0], ValuesOf(s.one, s.root, s.numel));
}

std::string AllReduce(const Setting& s) {
  Tensors t{s.Mine(s.numel)};
  c10d::AllreduceOptions options;
  options.reduceOp = s.one.reduce;
  s.backend.allreduce(t, options)->wait();
  return Compare(t[0], Reduced(s.one, s.All(s.numel)));
}

std::string AllReduceCoalesced(const Setting& s) {
  Tensors t{s.Mine(s.numel, 0), s.Mine(s.numel + 3, 1)};
  c10d::AllreduceCoalescedOptions options;
  options.reduceOp = s.one.reduce;
  s.backend.allreduce_coalesced(t, options)->wait();
  return CompareAll(t, {Reduced(s.one, s.All(s.numel, 0)),
                        Reduced(s.one, s.All(s.numel + 3, 1))});
}

std::string Reduce(const Setting& s) {
  Tensors t{s.Mine(s.numel)};
  c10d::ReduceOptions options;
  options.reduceOp = s.one.reduce;
  options.rootRank = s.root;
  s.backend.reduce(t, options)->wait();
  // What the others' tensors hold is not defined.
  if (s.rank != s.root) return "";
  return Compare(t[0], Reduced(s.one, s.All(s.numel)));
}

std::string AllGather(const Setting& s) {
  Tensors in{s.Mine(s.numel)};
  std::vector<Tensors> out{s.Places(s.numel)};
  s.backend.allgather(out, in)->wait();
  return CompareAll(out[0], s.All(s.numel));
}

std::string AllGatherBase(const Setting& s) {
  at::Tensor in = s.Mine(s.numel);
  at::Tensor out = torch::zeros({s.size * s.numel}, in.options());
  s.backend._allgather_base(out, in)->wait();
  return Compare(out, torch::cat(s.All(s.numel)));
}

std::string AllGatherCoalesced(const Setting& s) {
  Tensors in{s.Mine(s.numel, 0), s.Mine(s.numel + 3, 1)};
  std::vector<Tensors> out;
  for (int r = 0; r < s.size; ++r) {
    out.push_back({Empty(s.one, s.numel), Empty(s.one, s.numel + 3)});
  }
  s.backend.allgather_coalesced(out, in)->wait();
  for (int r = 0; r < s.size; ++r) {
    const std::string wrong = CompareAll(
        out[r],
        {ValuesOf(s.one, r, s.numel, 0), ValuesOf(s.one, r, s.numel + 3, 1)});
    if (!wrong.empty()) return absl::StrCat("of rank ", r, ", ", wrong);
  }
  return "";
}

std::string AllGatherIntoTensorCoalesced(const Setting& s) {
  Tensors in{s.Mine(s.numel, 0), s.Mine(s.numel + 3, 1)};
  Tensors out;
  for (const at::Tensor& t : in) {
    out.push_back(torch::zeros({s.size * t.numel()}, t.options()));
  }
  s.backend.allgather_into_tensor_coalesced(out, in)->wait();
  return CompareAll(
      out, {torch::cat(s.All(s.numel, 0)), torch::cat(s.All(s.numel + 3, 1))});
}

std::string Gather(const Setting& s) {
  Tensors in{s.Mine(s.numel)};
  std::vector<Tensors> out;
  if (s.rank == s.root) out.push_back(s.Places(s.numel));
  c10d::GatherOptions options;
  options.rootRank = s.root;
  s.backend.gather(out, in, options)->wait();
  return s.rank == s.root ? CompareAll(out[0], s.All(s.numel)) : "";
}

std::string Scatter(const Setting& s) {
  Tensors out{Empty(s.one, s.numel)};
  std::vector<Tensors> in;
  if (s.rank == s.root) in.push_back(s.Placed(s.Rows(s.root, s.numel)));
  c10d::ScatterOptions options;
  options.rootRank = s.root;
  s.backend.scatter(out, in, options)->wait();
  return Compare(out[0], s.Between(s.root, s.rank, s.numel));
}

std::string ReduceScatter(const Setting& s) {
  Tensors out{Empty(s.one, s.numel)};
  std::vector<Tensors> in{s.Placed(s.Rows(s.rank, s.numel))};
  c10d::ReduceScatterOptions options;
  options.reduceOp = s.one.reduce;
  s.backend.reduce_scatter(out, in, options)->wait();
  return Compare(out[0], Reduced(s.one, s.Column(s.numel)));
}

std::string ReduceScatterBase(const Setting& s) {
  at::Tensor out = Empty(s.one, s.numel);
  at::Tensor in = Place(s.one, torch::cat(s.Rows(s.rank, s.numel)));
  c10d::ReduceScatterOptions options;
  options.reduceOp = s.one.reduce;
  s.backend._reduce_scatter_base(out, in, options)->wait();
  return Compare(out, Reduced(s.one, s.Column(s.numel)));
}

std::string ReduceScatterTensorCoalesced(const Setting& s) {
  Tensors out, in;
  for (int64_t numel : {s.numel, s.numel + 3}) {
    out.push_back(Empty(s.one, numel));
    in.push_back(Place(s.one, torch::cat(s.Rows(s.rank, numel))));
  }
  c10d::ReduceScatterOptions options;
  options.reduceOp = s.one.reduce;
  s.backend.reduce_scatter_tensor_coalesced(out, in, options)->wait();
  return CompareAll(out, {Reduced(s.one, s.Column(s.numel)),
                          Reduced(s.one, s.Column(s.numel + 3))});
}

std::string AllToAll(const Setting& s) {
  Tensors in = s.Placed(s.Rows(s.rank, s.numel));
  Tensors out = s.Places(s.numel);
  s.backend.alltoall(out, in)->wait();
  return CompareAll(out, s.Column(s.numel));
}

std::string AllToAllBase(const Setting& s) {
  at::Tensor in = Place(s.one, torch::cat(s.Rows(s.rank, s.numel)));
  at::Tensor out = Empty(s.one, s.size * s.numel);
  std::vector<int64_t> even;
  s.backend.alltoall_base(out, in, even, even)->wait();
  return Compare(out, torch::cat(s.Column(s.numel)));
}

// Rank r has numel + (r + 2 p) % 3 elements for rank p.
std::string AllToAllUneven(const Setting& s) {
  auto length = [&](int from, int to) { return s.numel + (from + 2 * to) % 3; };
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
  return Compare(out, want);
}

// To the next rank and from the one before; two messages that are received in
// the other order.
std::string SendReceive(const Setting& s) {
  const int next = (s.rank + 1) % s.size;
  const int previous = (s.rank + s.size - 1) % s.size;
  Tensors out[2] = {{s.Mine(s.numel, 0)}, {s.Mine(s.numel, 1)}};
  Tensors in[2] = {{Empty(s.one, s.numel)}, {Empty(s.one, s.numel)}};
  auto send_0 = s.backend.send(out[0], next, 10);
  auto send_1 = s.backend.send(out[1], next, 11);
  auto receive_1 = s.backend.recv(in[1], previous, 11);
  auto receive_0 = s.backend.recv(in[0], previous, 10);
  for (const auto& work : {receive_0, receive_1, send_0, send_1}) work->wait();
  return CompareAll({in[0][0], in[1][0]},
                    {ValuesOf(s.one, previous, s.numel, 0),
                     ValuesOf(s.one, previous, s.numel, 1)});
}

// Everyone sends to the root, which does not know who comes first.
std::string ReceiveAnySource(const Setting& s) {
  // The messages of the next case may come before the last ones of this.
  static int tag = 100;
  ++tag;
  if (s.rank != s.root) {
    Tensors out{s.Mine(s.numel)};
    s.backend.send(out, s.root, tag)->wait();
    return "";
  }
  std::vector<bool> seen(s.size);
  for (int i = 1; i < s.size; ++i) {
    Tensors in{Empty(s.one, s.numel)};
    auto work = s.backend.recvAnysource(in, tag);
    work->wait();
    const int from = work->sourceRank();
    if (from < 0 || from >= s.size || from == s.rank || seen[from]) {
      return absl::StrCat("receive ", i, " is from rank ", from);
    }
    seen[from] = true;
    const std::string wrong =
        Compare(in[0], ValuesOf(s.one, from, s.numel), "received");
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string Barrier(const Setting& s) {
  s.backend.barrier()->wait();
  return "";
}

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

absl::Span<const Op> Ops() { return kOps; }

}  // namespace conformance

std::string RunConformanceCase(c10d::Backend& backend,
                               const ConformanceCase& one) {
  const int size = backend.getSize();
  return conformance::OpOf(one.op).run({backend, one, backend.getRank(), size,
                                        static_cast<int>(one.numel % size)});
}

}  // namespace tessera
