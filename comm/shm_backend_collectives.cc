// The collectives of ShmBackend.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "comm/shm_backend_impl.h"

namespace tessera {

using c10d::OpType;
using shm::Collectives;

namespace {

void CheckAllGatherBase(const at::Tensor& output, const at::Tensor& input,
                        int size) {
  CheckTensor("all-gather", output);
  CheckTensor("all-gather", input);
  CheckAlike("all-gather", output, input, size);
  CheckArgument(IsPlain(output), "all-gather", "expected a contiguous output");
}

void CheckReduceScatterBase(const at::Tensor& output, const at::Tensor& input,
                            const c10d::ReduceOp& reduce, int size) {
  CheckTensor("reduce-scatter", output);
  CheckTensor("reduce-scatter", input);
  CheckAlike("reduce-scatter", input, output, size);
  ReductionOf("reduce-scatter", reduce, output.scalar_type());
}

}  // namespace

WorkPtr ShmBackend::broadcast(Tensors& tensors,
                              const c10d::BroadcastOptions& options) {
  CheckTensors("broadcast", "tensors", tensors, 1);
  CheckRoot("broadcast", options.rootRank, getSize());
  CollectiveRecord record = RecordOf(CollectiveOp::kBroadcast, tensors[0]);
  const int root = record.root = static_cast<int>(options.rootRank);
  return Submit(OpType::BROADCAST, record, tensors,
                [tensors, root](Collectives& all, const std::string& what) {
                  const Results data(tensors, /*with_content=*/true);
                  TESSERA_RETURN_IF_ERROR(
                      all.Broadcast(what, data.at(0), Bytes(tensors[0]), root));
                  data.Home();
                  return absl::OkStatus();
                });
}

WorkPtr ShmBackend::allreduce(Tensors& tensors,
                              const c10d::AllreduceOptions& options) {
  CheckTensors("all-reduce", "tensors", tensors, 1);
  const Reduction how =
      ReductionOf("all-reduce", options.reduceOp, tensors[0].scalar_type());
  CollectiveRecord record = RecordOf(CollectiveOp::kAllReduce, tensors[0]);
  record.reduce = how.name;
  return Submit(OpType::ALLREDUCE, record, tensors,
                [tensors, how](Collectives& all, const std::string& what) {
                  const Results data(tensors, /*with_content=*/true);
                  TESSERA_RETURN_IF_ERROR(
                      all.AllReduce(what, how.type, how.op, data.at(0),
                                    tensors[0].numel() * how.parts));
                  data.Home();
                  return absl::OkStatus();
                });
}

WorkPtr ShmBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  for (const at::Tensor& t : tensors) {
    CheckTensor("all-reduce", t);
    ReductionOf("all-reduce", options.reduceOp, t.scalar_type());
  }
  return Together(tensors.size(), [&](size_t i) {
    Tensors one{tensors[i]};
    return allreduce(one, options);
  });
}

WorkPtr ShmBackend::reduce(Tensors& tensors,
                           const c10d::ReduceOptions& options) {
  CheckTensors("reduce", "tensors", tensors, 1);
  CheckRoot("reduce", options.rootRank, getSize());
  const Reduction how =
      ReductionOf("reduce", options.reduceOp, tensors[0].scalar_type());
  CollectiveRecord record = RecordOf(CollectiveOp::kReduce, tensors[0]);
  record.reduce = how.name;
  const int root = record.root = static_cast<int>(options.rootRank);
  return Submit(
      OpType::REDUCE, record, tensors,
      [tensors, how, root](Collectives& all, const std::string& what) {
        const Results data(tensors, /*with_content=*/true);
        TESSERA_RETURN_IF_ERROR(all.Reduce(what, how.type, how.op, data.at(0),
                                           tensors[0].numel() * how.parts,
                                           root));
        data.Home();
        return absl::OkStatus();
      });
}

WorkPtr ShmBackend::AllGather(OpType type, Tensors outputs, at::Tensor input) {
  CheckTensor("all-gather", input);
  CheckTensors("all-gather", "outputs", outputs, getSize());
  for (const at::Tensor& t : outputs) CheckAlike("all-gather", t, input);
  CheckApart("all-gather", outputs, input, getRank());
  CollectiveRecord record = RecordOf(CollectiveOp::kAllGather, input);
  record.bytes *= getSize();
  return Submit(type, record, outputs,
                [outputs, input](Collectives& all, const std::string& what) {
                  const at::Tensor in = Plain(input);
                  const Results out(outputs);
                  TESSERA_RETURN_IF_ERROR(all.AllGather(
                      what, in.const_data_ptr(), out.places(), Bytes(in)));
                  out.Home();
                  return absl::OkStatus();
                });
}

WorkPtr ShmBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions&) {
  CheckTensors("all-gather", "inputs", inputs, 1);
  CheckArgument(outputs.size() == 1, "all-gather",
                "expected one list of outputs");
  return AllGather(OpType::ALLGATHER, outputs[0], inputs[0]);
}

WorkPtr ShmBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                    const c10d::AllgatherOptions&) {
  CheckAllGatherBase(output, input, getSize());
  return AllGather(OpType::_ALLGATHER_BASE, PartsOf(output, getSize()), input);
}

WorkPtr ShmBackend::allgather_coalesced(std::vector<Tensors>& outputs,
                                        Tensors& inputs,
                                        const c10d::AllgatherOptions& options) {
  CheckArgument(outputs.size() == static_cast<size_t>(getSize()), "all-gather",
                absl::StrCat("expected a list of outputs for each of ",
                             getSize(), " ranks, got ", outputs.size()));
  for (const Tensors& of_rank : outputs) {
    CheckTensors("all-gather", "outputs of a rank", of_rank, inputs.size());
  }
  return Together(inputs.size(), [&](size_t i) {
    Tensors of_input;
    for (const Tensors& of_rank : outputs) of_input.push_back(of_rank[i]);
    return AllGather(OpType::ALLGATHER_COALESCED, of_input, inputs[i]);
  });
}

WorkPtr ShmBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  CheckArgument(
      outputs.size() == inputs.size(), "all-gather",
      absl::StrCat(outputs.size(), " outputs, ", inputs.size(), " inputs"));
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckAllGatherBase(outputs[i], inputs[i], getSize());
  }
  return Together(inputs.size(), [&](size_t i) {
    return _allgather_base(outputs[i], inputs[i], options);
  });
}

WorkPtr ShmBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                           const c10d::GatherOptions& options) {
  CheckTensors("gather", "inputs", inputs, 1);
  CheckRoot("gather", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  Tensors out;
  if (root == getRank()) {
    CheckArgument(outputs.size() == 1, "gather",
                  "expected one list of outputs");
    out = outputs[0];
    CheckTensors("gather", "outputs", out, getSize());
    for (const at::Tensor& t : out) CheckAlike("gather", t, inputs[0]);
    CheckApart("gather", out, inputs[0], root);
  } else {
    CheckArgument(outputs.empty(), "gather", "outputs belong to the root only");
  }
  CollectiveRecord record = RecordOf(CollectiveOp::kGather, inputs[0]);
  record.root = root;
  return Submit(
      OpType::GATHER, record, out,
      [out, input = inputs[0], root](Collectives& all,
                                     const std::string& what) {
        const at::Tensor in = Plain(input);
        const Results results(out);
        TESSERA_RETURN_IF_ERROR(all.Gather(what, in.const_data_ptr(),
                                           results.places(), Bytes(in), root));
        results.Home();
        return absl::OkStatus();
      });
}

WorkPtr ShmBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                            const c10d::ScatterOptions& options) {
  CheckTensors("scatter", "outputs", outputs, 1);
  CheckRoot("scatter", options.rootRank, getSize());
  const int root = static_cast<int>(options.rootRank);
  Tensors in;
  if (root == getRank()) {
    CheckArgument(inputs.size() == 1, "scatter", "expected one list of inputs");
    in = inputs[0];
    CheckTensors("scatter", "inputs", in, getSize());
    for (const at::Tensor& t : in) CheckAlike("scatter", t, outputs[0]);
    CheckApart("scatter", in, outputs[0], root);
  } else {
    CheckArgument(inputs.empty(), "scatter", "inputs belong to the root only");
  }
  CollectiveRecord record = RecordOf(CollectiveOp::kScatter, outputs[0]);
  record.root = root;
  return Submit(OpType::SCATTER, record, outputs,
                [outputs, in, root](Collectives& all, const std::string& what) {
                  const at::Tensor joined =
                      in.empty() ? at::Tensor() : Joined(in);
                  const Results out(outputs);
                  TESSERA_RETURN_IF_ERROR(all.Scatter(
                      what, in.empty() ? nullptr : joined.const_data_ptr(),
                      out.at(0), Bytes(outputs[0]), root));
                  out.Home();
                  return absl::OkStatus();
                });
}

WorkPtr ShmBackend::ReduceScatter(OpType type, at::Tensor output,
                                  Tensors inputs,
                                  const c10d::ReduceOp& reduce) {
  const Reduction how =
      ReductionOf("reduce-scatter", reduce, output.scalar_type());
  CheckApart("reduce-scatter",
             inputs.size() > 1 || !IsPlain(inputs[0])
                 ? inputs
                 : PartsOf(inputs[0], getSize()),
             output, getRank());
  CollectiveRecord record = RecordOf(CollectiveOp::kReduceScatter, output);
  record.bytes *= getSize();
  record.reduce = how.name;
  const Tensors outputs{std::move(output)};
  return Submit(
      type, record, outputs,
      [outputs, inputs, how](Collectives& all, const std::string& what) {
        const at::Tensor in = Joined(inputs);
        const Results out(outputs);
        TESSERA_RETURN_IF_ERROR(
            all.ReduceScatter(what, how.type, how.op, in.const_data_ptr(),
                              out.at(0), outputs[0].numel() * how.parts));
        out.Home();
        return absl::OkStatus();
      });
}

WorkPtr ShmBackend::reduce_scatter(Tensors& outputs,
                                   std::vector<Tensors>& inputs,
                                   const c10d::ReduceScatterOptions& options) {
  CheckTensors("reduce-scatter", "outputs", outputs, 1);
  CheckArgument(inputs.size() == 1, "reduce-scatter",
                "expected one list of inputs");
  CheckTensors("reduce-scatter", "inputs", inputs[0], getSize());
  for (const at::Tensor& t : inputs[0]) {
    CheckAlike("reduce-scatter", t, outputs[0]);
  }
  return ReduceScatter(OpType::REDUCE_SCATTER, outputs[0], inputs[0],
                       options.reduceOp);
}

WorkPtr ShmBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input,
    const c10d::ReduceScatterOptions& options) {
  CheckReduceScatterBase(output, input, options.reduceOp, getSize());
  return ReduceScatter(OpType::_REDUCE_SCATTER_BASE, output, {input},
                       options.reduceOp);
}

WorkPtr ShmBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs,
    const c10d::ReduceScatterOptions& options) {
  CheckArgument(
      outputs.size() == inputs.size(), "reduce-scatter",
      absl::StrCat(outputs.size(), " outputs, ", inputs.size(), " inputs"));
  for (size_t i = 0; i < inputs.size(); ++i) {
    CheckReduceScatterBase(outputs[i], inputs[i], options.reduceOp, getSize());
  }
  return Together(inputs.size(), [&](size_t i) {
    return _reduce_scatter_base(outputs[i], inputs[i], options);
  });
}

WorkPtr ShmBackend::AllToAll(OpType type, Tensors outputs, Tensors inputs) {
  CheckArgument(outputs[0].scalar_type() == inputs[0].scalar_type(),
                "all-to-all", "outputs and inputs differ in dtype");
  for (const at::Tensor& t : outputs) CheckApart("all-to-all", inputs, t, -1);
  CollectiveRecord record = RecordOf(CollectiveOp::kAllToAll, inputs[0]);
  record.bytes = 0;  // they differ between ranks
  std::vector<int64_t> sends, receives;
  for (const at::Tensor& t : inputs) sends.push_back(Bytes(t));
  for (const at::Tensor& t : outputs) receives.push_back(Bytes(t));
  return Submit(
      type, record, outputs, [=](Collectives& all, const std::string& what) {
        const at::Tensor in = Joined(inputs);
        const Results out(outputs);
        TESSERA_RETURN_IF_ERROR(all.AllToAll(what, in.const_data_ptr(), sends,
                                             out.places(), receives));
        out.Home();
        return absl::OkStatus();
      });
}

WorkPtr ShmBackend::alltoall(Tensors& outputs, Tensors& inputs,
                             const c10d::AllToAllOptions&) {
  CheckTensors("all-to-all", "outputs", outputs, getSize());
  CheckTensors("all-to-all", "inputs", inputs, getSize());
  return AllToAll(OpType::ALLTOALL, outputs, inputs);
}

WorkPtr ShmBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                  std::vector<int64_t>& output_splits,
                                  std::vector<int64_t>& input_splits,
                                  const c10d::AllToAllOptions&) {
  CheckTensor("all-to-all", output);
  CheckTensor("all-to-all", input);
  return AllToAll(OpType::ALLTOALL_BASE,
                  SplitsOf("outputs", output, output_splits, getSize()),
                  SplitsOf("inputs", input, input_splits, getSize()));
}

WorkPtr ShmBackend::barrier(const c10d::BarrierOptions&) {
  CollectiveRecord record;
  record.op = CollectiveOp::kBarrier;
  return Submit(OpType::BARRIER, record, {},
                [](Collectives& all, const std::string& what) {
                  return all.Barrier(what);
                });
}

void ShmBackend::monitoredBarrier(const c10d::BarrierOptions& options, bool) {
  barrier(options)->wait();
}

}  // namespace tessera
