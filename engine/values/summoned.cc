// Why units are updated before they are held and again at the end. What a user
// wrote before the scope must stay when the scope takes its own writes back; so
// it goes to the masters first. And while the scope is open no update may come
// between, as it would take half of what is being written: so everything that
// enters an ExclusiveScope is refused until Close (EngineLife::summoned).
//
// Why rank 0's hold is told to the others. Where gathers are collectives the
// others must take part in the one that makes the unit whole there, and then
// not use it: their gather would wait for rank 0, which has nothing to gather.
#include "engine/values/summoned.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch_guard.h"
#include "engine/build/initial_sync.h"
#include "engine/model/exclusive_scope.h"
#include "engine/model/part_values.h"
#include "sharding/dispatch/saved_tensors.h"
#include "sharding/flat/summoning.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

constexpr char kWhere[] = "Engine::Summon";
constexpr char kClose[] = "SummonScope::Close";

// Numbers of the flats that these parameters are in, each once, in order.
absl::StatusOr<std::vector<size_t>> FlatsOf(
    const UpdateGuard& guard, const std::vector<at::Tensor>& parameters) {
  const auto& all = guard.model().flats();
  absl::flat_hash_map<const void*, size_t> flat_of;
  for (size_t u = 0; u < all.size(); ++u) {
    for (const auto& p : all[u]->parameters()) {
      flat_of[p.tensor.unsafeGetTensorImpl()] = u;
    }
  }
  std::vector<size_t> flats;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = flat_of.find(parameters[i].unsafeGetTensorImpl());
    if (found == flat_of.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tensor ", i,
          " is not a parameter that this engine shards: expected "
          "the module's own tensors, not views or copies of them"));
    }
    if (guard.life().summoned(all[found->second].get())) {
      return absl::FailedPreconditionError(absl::StrCat(
          "[", all[found->second]->name(),
          "] the unit is in another scope of Engine::Summon; Close() that "
          "one first"));
    }
    flats.push_back(found->second);
  }
  std::sort(flats.begin(), flats.end());
  flats.erase(std::unique(flats.begin(), flats.end()), flats.end());
  return flats;
}

// All ranks gave the same. COLLECTIVE.
absl::Status CheckSameRequest(const ShardedModel& model,
                              const std::vector<size_t>& flats,
                              const SummonOptions& options) {
  std::vector<std::string> names;
  for (const size_t u : flats) names.push_back(model.flats()[u]->name());
  return CheckSame(
      absl::StrCat(absl::StrJoin(names, ", "), "; rank0_only ",
                   options.rank0_only, ", writeback ", options.writeback),
      "list of units, or the options, of Engine::Summon", model.comm());
}

// What was written into a flat is taken. COLLECTIVE. On an error nothing is.
absl::Status TakeWrites(UpdateGuard* guard, FlatParameter* flat,
                        absl::string_view where) {
  ExclusiveScope scope(guard, where);
  TESSERA_RETURN_IF_ERROR(scope.BeginOne(flat));
  // Not all ranks had it whole in the same way.
  flat->DropSecondary();
  return scope.Commit();
}

}  // namespace

absl::StatusOr<std::vector<at::Tensor>> ParametersByName(
    const torch::nn::Module& module, const std::vector<std::string>& names) {
  const auto all = module.named_parameters();
  std::vector<at::Tensor> parameters;
  for (const std::string& name : names) {
    const at::Tensor* const found = all.find(name);
    if (found == nullptr) {
      return absl::NotFoundError(
          absl::StrCat("the engine has no parameter '", name,
                       "' (names are those of named_parameters())"));
    }
    parameters.push_back(*found);
  }
  return parameters;
}

Summoned::Summoned(const std::shared_ptr<UpdateGuard>& guard,
                   const SummonOptions& options,
                   std::vector<at::Tensor> parameters)
    : guard_(guard),
      options_(options),
      holds_(!options.rank0_only || guard->comm()->rank() == 0),
      parameters_(std::move(parameters)) {}

absl::StatusOr<std::unique_ptr<Summoned>> Summoned::Open(
    const std::shared_ptr<UpdateGuard>& guard,
    absl::StatusOr<std::vector<at::Tensor>> parameters,
    const SummonOptions& options) {
  TESSERA_RETURN_IF_ERROR(guard->life().CheckOpen());
  TESSERA_RETURN_IF_ERROR(CheckWhole(guard->model(), kWhere));
  const absl::StatusOr<std::vector<size_t>> flats =
      parameters.ok() ? FlatsOf(*guard, *parameters) : parameters.status();
  TESSERA_RETURN_IF_ERROR(guard->comm()->AgreeOk(flats.status(), kWhere));
  TESSERA_RETURN_IF_ERROR(CheckSameRequest(guard->model(), *flats, options));
  // What was written before is not taken back.
  for (const size_t u : *flats) {
    TESSERA_RETURN_IF_ERROR(
        TakeWrites(guard.get(), guard->model().flats()[u].get(), kWhere));
  }
  std::unique_ptr<Summoned> summoned(
      new Summoned(guard, options, *std::move(parameters)));
  absl::Status mine;
  for (const size_t u : *flats) {
    mine.Update(CatchTorch(kWhere, [&] {  //
      return summoned->Hold(guard.get(), u);
    }));
    guard->model()
        .schedule()
        ->EndPass();  // frees it again where it is not held
  }
  const absl::Status agreed = guard->comm()->AgreeOk(mine, kWhere);
  if (agreed.ok()) return summoned;
  summoned->Drop();
  return agreed;
}

absl::Status Summoned::Hold(UpdateGuard* guard, size_t u) {
  const std::shared_ptr<FlatParameter>& flat = guard->model().flats()[u];
  Summoning summoning(flat.get());
  TESSERA_RETURN_IF_ERROR(holds_ ? summoning.Begin()
                                 : summoning.BeginElsewhere(0));
  flats_.push_back(flat);
  guard->life().BeginSummon(flat.get());
  return absl::OkStatus();
}

absl::Status Summoned::Close() {
  if (flats_.empty()) return absl::OkStatus();
  const std::shared_ptr<UpdateGuard> guard = guard_.lock();
  if (guard == nullptr) {
    return absl::FailedPreconditionError(
        "SummonScope::Close: its engine was destroyed");
  }
  TESSERA_RETURN_IF_ERROR(guard->life().CheckOpen());
  ReleaseNodePins();
  guard->model().schedule()->EndPass();
  while (!flats_.empty()) {
    FlatParameter* const flat = flats_.front().get();
    TESSERA_RETURN_IF_ERROR(
        CatchTorch(kClose, [&] { return CloseFlat(guard.get(), flat); }));
    guard->life().EndSummon(flat);
    flats_.erase(flats_.begin());
  }
  return absl::OkStatus();
}

absl::Status Summoned::CloseFlat(UpdateGuard* guard, FlatParameter* flat) {
  Summoning summoning(flat);
  const bool keeps = options_.writeback;
  const bool receives = keeps && !holds_;
  const absl::Status mine =
      holds_ ? summoning.CheckAlone()
      : receives
          ? CatchTorch(kClose, [&] { return summoning.PrepareReceive(); })
          : absl::OkStatus();
  const absl::Status agreed = guard->comm()->AgreeOk(mine, kClose);
  if (!agreed.ok()) {
    if (receives && mine.ok()) summoning.DropReceived();
    return agreed;
  }
  if (keeps && options_.rank0_only) {
    const absl::Status sent = summoning.BroadcastWritten(0);
    if (!sent.ok()) return ExclusiveScope::FailAll(guard, sent);
  }
  if (holds_) {
    summoning.End(keeps);
  } else {
    summoning.EndElsewhere();
  }
  if (!keeps) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(TakeWrites(guard, flat, kClose));
  for (const auto& p : flat->parameters()) {
    const bool given =
        std::any_of(parameters_.begin(), parameters_.end(),
                    [&](const at::Tensor& t) { return t.is_same(p.tensor); });
    if (given) torch::autograd::impl::bump_version(p.tensor);
  }
  return absl::OkStatus();
}

void Summoned::Drop() {
  const std::shared_ptr<UpdateGuard> guard = guard_.lock();
  for (const auto& flat : flats_) {
    const absl::Status dropped = CatchTorch(kWhere, [&] {
      if (holds_) {
        Summoning(flat.get()).End(/*keep_writes=*/false);
      } else {
        Summoning(flat.get()).EndElsewhere();
      }
    });
    if (!dropped.ok()) TESSERA_LOG(ERROR) << dropped.ToString();
    if (guard != nullptr) guard->life().EndSummon(flat.get());
  }
  flats_.clear();
}

Summoned::~Summoned() {
  if (flats_.empty()) return;
  if (options_.writeback && holds_) {
    TESSERA_LOG(ERROR)
        << "[" << flats_[0]->name()
        << "] a scope of Engine::Summon ended without Close(): what was "
           "written into its parameters is discarded";
  }
  Drop();
}

}  // namespace tessera
