#include "engine/build/initial_sync.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/bits.h"
#include "base/layout/flat_buffer.h"
#include "base/status.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "comm/all_gather_values.h"
#include "sharding/construct/construction.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

// All bytes of the tensor's storage, as a tensor.
at::Tensor StorageBytes(const at::Tensor& t) {
  const auto bytes = static_cast<int64_t>(t.storage().nbytes());
  return TensorOver(static_cast<char*>(t.storage().mutable_data()), {bytes},
                    {1}, at::kByte, t.device());
}

// What must be equal of one parameter.
struct Print {
  uint64_t name;
  uint64_t geometry;
  uint64_t values;
  uint64_t requires_grad;
};

constexpr char kParameter[] = "parameter";
constexpr char kIgnored[] = "ignored parameter";

// Whether values are to be compared: one rank has nobody to compare them with,
// and reading all of a model from a device takes seconds.
bool Compares(const Communicator& comm) { return comm.world_size() > 1; }

uint64_t PrintOf(absl::string_view text) {
  return Fingerprint(text.data(), static_cast<int64_t>(text.size()));
}

// What the engine leaves alone may be of any kind.
bool HasBytes(const at::Tensor& t) {
  return t.layout() == at::kStrided && t.has_storage() && !t.is_meta();
}

Print PrintOf(const NamedParameter& p, bool values) {
  Print print{PrintOf(p.name), 0, 0, p.tensor.requires_grad()};
  if (!HasBytes(p.tensor)) return print;
  print.geometry = PrintOf(GeometryOf(p.tensor));
  if (!values) return print;
  if (const auto all = FingerprintOfEvictable(p.tensor)) {
    print.values = *all;
    return print;
  }
  const at::Tensor host = p.tensor.detach().resolve_conj().resolve_neg().cpu();
  // In the order of memory where that is all of its elements.
  const at::Tensor dense =
      host.is_non_overlapping_and_dense() ? host : host.contiguous();
  print.values =
      Fingerprint(dense.const_data_ptr(), static_cast<int64_t>(dense.nbytes()));
  return print;
}

// What differs of one parameter; "" if nothing does.
std::string DifferenceOf(const Print& first, const Print& theirs) {
  return theirs.name != first.name           ? "name"
         : theirs.geometry != first.geometry ? "shape or dtype"
         : theirs.values != first.values     ? "values"
                                             : "";
}

// The prints of all ranks. InvalidArgument names the first thing that differs
// from rank 0's, so that every rank comes to the same verdict. COLLECTIVE.
absl::StatusOr<std::vector<std::vector<Print>>> ComparePrints(
    const std::vector<Print>& mine, const std::vector<NamedParameter>& names,
    absl::string_view kind, Communicator* comm) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto all,
      AllGatherLists(comm, mine,
                     CommTag{absl::StrCat("comparison of ", kind, "s")}));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].size() == all[0].size()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the module has ", all[rank].size(), " ", kind,
                     "s on rank ", rank, " and ", all[0].size(),
                     " on rank 0; build the same module on every rank"));
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (size_t i = 0; i < mine.size(); ++i) {
      const std::string what = DifferenceOf(all[0][i], all[rank][i]);
      if (what.empty()) continue;
      const bool values = what == "values";
      return absl::InvalidArgumentError(absl::StrCat(
          "the ", what, " of ", kind, " '", names[i].name, "' (number ", i,
          values ? ") differ" : ") differs", " between rank 0 and rank ", rank,
          values ? "; give all ranks the same seed before building the module, "
                   "or set "
                   "EngineOptions::sync_from_rank0"
                 : "; build the same module on every rank",
          values && kind != kParameter
              ? ", or EngineOptions::buffers_may_differ"
              : ""));
    }
  }
  return all;
}

}  // namespace

std::string GeometryOf(const at::Tensor& t) {
  std::string text = absl::StrCat(static_cast<int>(t.scalar_type()), "|");
  for (int64_t s : t.sizes()) absl::StrAppend(&text, s, ",");
  for (int64_t s : t.strides()) absl::StrAppend(&text, "/", s);
  return text;
}

absl::Status BroadcastFromRank0(const torch::nn::Module& module,
                                absl::Span<const UnitPlan> plans,
                                absl::Span<const NamedParameter> ignored,
                                Communicator* comm) {
  TorchScope scope;
  for (const NamedParameter& p : ignored) {
    if (!HasBytes(p.tensor) || p.tensor.storage().nbytes() == 0) continue;
    // It may be on another device than the collectives'.
    const at::Tensor own = StorageBytes(p.tensor);
    const at::Tensor sent =
        own.to(plans[0].parameters[0].tensor.device(), own.scalar_type());
    TESSERA_RETURN_IF_ERROR(
        comm->Broadcast(sent, 0, CommTag{absl::StrCat("broadcast of ", p.name)})
            .Wait());
    if (!sent.is_same(own)) own.copy_(sent);
  }
  for (const auto& plan : plans) {
    for (const auto& p : plan.parameters) {
      // Rank 0 has only a part of such a tensor; all ranks must construct the
      // same values.
      if (IsEvictable(p.tensor)) continue;
      TESSERA_RETURN_IF_ERROR(
          comm->Broadcast(StorageBytes(p.tensor), 0,
                          CommTag{absl::StrCat("broadcast of ", p.name)})
              .Wait());
    }
  }
  for (const auto& entry : module.named_buffers(/*recurse=*/true)) {
    if (!entry.value().defined() || entry.value().numel() == 0) continue;
    TESSERA_RETURN_IF_ERROR(
        comm->Broadcast(StorageBytes(entry.value()), 0,
                        CommTag{absl::StrCat("broadcast of ", entry.key())})
            .Wait());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<bool>> CheckEqual(absl::Span<const UnitPlan> plans,
                                             Communicator* comm, bool values) {
  TorchScope scope;
  values &= Compares(*comm);
  std::vector<NamedParameter> parameters;
  std::vector<Print> prints;
  for (const auto& plan : plans) {
    for (const auto& p : plan.parameters) {
      prints.push_back(PrintOf(p, values));
      parameters.push_back(p);
    }
  }
  TESSERA_ASSIGN_OR_RETURN(const auto all,
                           ComparePrints(prints, parameters, kParameter, comm));
  std::vector<bool> requires_grad(prints.size(), false);
  for (const auto& theirs : all) {
    for (size_t i = 0; i < theirs.size(); ++i) {
      if (!theirs[i].requires_grad) continue;
      requires_grad[static_cast<size_t>(parameters[i].index)] = true;
    }
  }
  return requires_grad;
}

absl::Status CheckIgnoredEqual(absl::Span<const NamedParameter> ignored,
                               Communicator* comm, bool values) {
  TorchScope scope;
  values &= Compares(*comm);
  std::vector<Print> prints;
  const absl::Status printed = CatchTorch("comparison of parameters", [&] {
    for (const NamedParameter& p : ignored) {
      prints.push_back(PrintOf(p, values));
    }
  });
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(printed, "Engine::Create"));
  return ComparePrints(prints, {ignored.begin(), ignored.end()}, kIgnored, comm)
      .status();
}

absl::Status CheckBuffersEqual(const torch::nn::Module& module,
                               Communicator* comm) {
  TorchScope scope;
  std::vector<NamedParameter> buffers;
  std::vector<Print> prints;
  const absl::Status printed = CatchTorch("comparison of buffers", [&] {
    for (const auto& b : module.named_buffers(/*recurse=*/true)) {
      const at::Tensor& t = b.value();
      if (!t.defined() || t.layout() != at::kStrided) continue;
      buffers.push_back({b.key(), t});
      prints.push_back(PrintOf(buffers.back(), Compares(*comm)));
    }
  });
  TESSERA_RETURN_IF_ERROR(comm->AgreeOk(printed, "Engine::Create"));
  return ComparePrints(prints, buffers, "buffer", comm).status();
}

absl::Status CheckSame(absl::string_view mine, absl::string_view what,
                       Communicator* comm) {
  return comm->AgreeEqual(mine, what);
}

}  // namespace tessera
