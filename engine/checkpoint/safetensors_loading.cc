#include "engine/checkpoint/safetensors_loading.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/empty.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "base/torch/device_ledger.h"
#include "base/torch/torch_scope.h"
#include "base/torch_guard.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/together.h"
#include "engine/build/initial_sync.h"
#include "engine/checkpoint/part_runs.h"
#include "engine/checkpoint/safetensors_plan.h"
#include "engine/model/exclusive_scope.h"
#include "parallel/tensor/placed.h"

namespace tessera {
namespace {

constexpr char kWhere[] = "Engine::LoadSafetensors";
constexpr int64_t kPieceNumel = 1 << 18;

at::ScalarType AsComplexAs(const at::Tensor& like, at::ScalarType dtype) {
  return like.is_complex() ? c10::toComplexType(dtype) : dtype;
}

// Returns a view of a contiguous tensor on the host as real elements,
// [elements].
at::Tensor ElementsOf(const at::Tensor& t) {
  return TensorOver(static_cast<char*>(t.mutable_data_ptr()),
                    {t.numel() * ElementsPerNumber(t.scalar_type())}, {1},
                    ElementType(t.scalar_type()), at::kCPU);
}

// Whole, in the tensor's dtype and sizes, on the host.
absl::StatusOr<at::Tensor> ReadWhole(const Safetensors& file,
                                     const SafetensorsMatch& match) {
  const at::ScalarType dtype = match.tensor.scalar_type();
  const at::Tensor values =
      at::empty(match.source->sizes, at::TensorOptions(dtype));
  const at::Tensor elements = ElementsOf(values);
  TESSERA_RETURN_IF_ERROR(
      file.Read(*match.source, {0, elements.numel()}, elements));
  return match.transposed ? values.t() : values;
}

// Rows [first, last) of the file into `rows`, which has them in another order
// of its elements. `row`: elements of each.
absl::Status ReadRows(const Safetensors& file, const SafetensorsTensor& source,
                      Range which, int64_t row, const at::Tensor& rows) {
  const int64_t at_once = std::max<int64_t>(1, kPieceNumel / row);
  std::vector<int64_t> sizes = rows.sizes().vec();
  for (int64_t r = which.begin; r < which.end; r += at_once) {
    sizes[0] = std::min(at_once, which.end - r);
    const at::Tensor piece = at::empty(sizes, rows.options().device(at::kCPU));
    TESSERA_RETURN_IF_ERROR(
        file.Read(source, {r * row, (r + sizes[0]) * row}, ElementsOf(piece)));
    rows.narrow(0, r - which.begin, sizes[0]).copy_(piece);
  }
  return absl::OkStatus();
}

// As ReadSegment, of a parameter that is divided: row-major in both.
absl::Status ReadRuns(const Safetensors& file, const SafetensorsMatch& from,
                      const FlatParameter::Parameter& p, Range mine,
                      const at::Tensor& to) {
  at::Tensor transposed;
  if (from.transposed) {
    TESSERA_ASSIGN_OR_RETURN(const at::Tensor whole, ReadWhole(file, from));
    transposed = ElementsOf(whole.contiguous());
  }
  const int64_t per = ElementsPerNumber(p.tensor.scalar_type());
  for (const PartRun& run : RunsOf(p.part, mine, per)) {
    const Range of{run.whole, run.whole + run.numel};
    const at::Tensor there = to.narrow(0, run.part - mine.begin, run.numel);
    if (transposed.defined()) {
      there.copy_(Slice(transposed, of));
    } else {
      TESSERA_RETURN_IF_ERROR(file.Read(*from.source, of, there));
    }
  }
  return absl::OkStatus();
}

// The part of a parameter that this rank owns. Elements lie in `owned` as in
// the parameter's memory, in the file in row-major order: where these differ,
// all rows that the part touches are read, and all rows there are where rows do
// not lie one behind the other in memory.
absl::Status ReadSegment(const Safetensors& file, const SafetensorsMatch& from,
                         const FlatParameter& flat,
                         const FlatParameter::Segment& segment,
                         const at::Tensor& owned) {
  const FlatParameter::Parameter& p =
      flat.parameters()[static_cast<size_t>(segment.parameter)];
  const SafetensorsTensor& source = *from.source;
  const at::Tensor t = from.transposed ? p.tensor.t() : p.tensor;
  const Range mine{segment.range.begin - p.range.begin,
                   segment.range.end - p.range.begin};
  const at::Tensor to = Slice(owned, {segment.range.begin - flat.owned().begin,
                                      segment.range.end - flat.owned().begin});
  if (p.part.has_value() && p.part->stands_in()) return absl::OkStatus();
  if (p.part.has_value() && !p.part->of_pipeline()) {
    return ReadRuns(file, from, p, mine, to);
  }
  if (t.is_contiguous()) return file.Read(source, mine, to);
  const int64_t row = p.range.numel() / t.size(0);
  Range rows{0, t.size(0)};
  if (t.stride(0) * t.size(0) == t.numel()) {
    rows = {mine.begin / row, (mine.end + row - 1) / row};
  }
  TESSERA_ASSIGN_OR_RETURN(
      const FlatBuffer dense,
      FlatBuffer::Allocate(rows.numel() * row, owned.scalar_type(),
                           flat.device(), MemoryKind::kWorking));
  std::vector<int64_t> sizes = t.sizes().vec();
  sizes[0] = rows.numel();
  TESSERA_RETURN_IF_ERROR(
      ReadRows(file, source, rows, row,
               TensorOver(dense.data(), sizes, t.strides(),
                          AsComplexAs(t, owned.scalar_type()), flat.device())));
  to.copy_(
      dense.View({mine.begin - rows.begin * row, mine.end - rows.begin * row}));
  return absl::OkStatus();
}

// What this rank needs to load: matched names, and whole values of what is not
// sharded. Nothing of the module is changed.
struct Loading {
  std::unique_ptr<Safetensors> file;
  std::string print;  // of the files, and of what the plan says of them
  SafetensorsPlan plan;
  absl::flat_hash_map<const void*, const SafetensorsMatch*> by_tensor;
  std::vector<std::pair<at::Tensor, at::Tensor>> plain;  // to, values

  // Returns what the file has of a parameter; null: nothing.
  const SafetensorsMatch* Find(const FlatParameter::Parameter& p) const {
    const auto found = by_tensor.find(p.of_module().unsafeGetTensorImpl());
    return found == by_tensor.end() ? nullptr : found->second;
  }
};

// The program's thread and that which reads have streams of their own.
void AwaitDevice(at::Device device) {
  if (device.is_cpu()) return;
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

// What this rank's masters will be.
absl::StatusOr<FlatBuffer> ReadOwned(const Loading& loading,
                                     FlatParameter* flat) {
  TorchScope scope;
  AwaitDevice(flat->device());
  TESSERA_ASSIGN_OR_RETURN(const RaisedValue value,
                           flat->states().RaiseValue());
  const at::Tensor masters = value.View();
  TESSERA_ASSIGN_OR_RETURN(
      FlatBuffer values,
      FlatBuffer::Allocate(masters.numel(), masters.scalar_type(),
                           flat->device(), MemoryKind::kWorking, Fill::kNone));
  values.View().copy_(masters);
  for (const FlatParameter::Segment& segment : flat->segments()) {
    const SafetensorsMatch* const from = loading.Find(
        flat->parameters()[static_cast<size_t>(segment.parameter)]);
    if (from == nullptr) continue;
    TESSERA_RETURN_IF_ERROR(
        ReadSegment(*loading.file, *from, *flat, segment, values.View()));
  }
  TESSERA_RETURN_IF_ERROR(loading.file->CheckUnchanged());
  AwaitDevice(flat->device());
  return values;
}

absl::Status SetMasters(FlatParameter* flat, const at::Tensor& values) {
  TorchScope scope;
  TESSERA_ASSIGN_OR_RETURN(RaisedValue value, flat->states().RaiseValue());
  value.View().copy_(values);
  return value.Commit();
}

absl::Status OpenFiles(const std::string& path, Loading* loading) {
  TESSERA_ASSIGN_OR_RETURN(loading->file, Safetensors::Open(path));
  TESSERA_ASSIGN_OR_RETURN(loading->print, loading->file->Fingerprint());
  return absl::OkStatus();
}

// On the program's own thread: `options` may call it.
absl::Status PlanLoading(const ShardedModel& model,
                         const LoadSafetensorsOptions& options,
                         Loading* loading) {
  TESSERA_ASSIGN_OR_RETURN(
      loading->plan, PlanSafetensors(model.module(), *loading->file, options));
  absl::StrAppend(&loading->print, ", ", PrintOf(loading->plan));
  return absl::OkStatus();
}

// Each rank compares a part. Without `strict` the first of two is taken, and
// the other is named. COLLECTIVE.
absl::Status CheckTies(const ShardedModel& model, bool strict,
                       Loading* loading) {
  const Communicator& comm = *model.comm();
  for (const SafetensorsTie& tie : loading->plan.ties) {
    const absl::Status same = RunTogether(model.comm(), kWhere, [&] {
      return CompareTie(*loading->file, tie, comm.rank(), comm.world_size());
    });
    if (strict || !absl::IsInvalidArgument(same)) {
      TESSERA_RETURN_IF_ERROR(same);
    } else {
      loading->plan.unexpected.push_back(tie.other->name);
      loading->plan.notes.emplace_back(same.message());
    }
  }
  for (const std::string& note : loading->plan.notes) {
    TESSERA_LOG_RANK0(WARNING) << kWhere << ": the first is loaded: " << note;
  }
  return absl::OkStatus();
}

// Reads what is not sharded.
absl::Status ReadPlain(const ShardedModel& model, Loading* loading) {
  absl::flat_hash_set<const void*> sharded;
  for (const auto& flat : model.flats()) {
    for (const FlatParameter::Parameter& p : flat->parameters()) {
      sharded.insert(p.of_module().unsafeGetTensorImpl());
    }
  }
  TorchScope scope;
  for (const SafetensorsMatch& match : loading->plan.matches) {
    const void* const known = PartOrSelf(match.tensor).unsafeGetTensorImpl();
    loading->by_tensor[known] = &match;
    if (sharded.contains(known)) continue;
    TESSERA_ASSIGN_OR_RETURN(at::Tensor values,
                             ReadWhole(*loading->file, match));
    loading->plain.emplace_back(match.tensor, std::move(values));
  }
  if (loading->plain.empty()) return absl::OkStatus();
  return loading->file->CheckUnchanged();
}

// Reads what this rank owns of a flat; where all ranks could, it becomes the
// flat's. Otherwise the flat is what it was. COLLECTIVE.
absl::Status LoadFlat(const Loading& loading, const ShardedModel& model,
                      size_t u, bool* could_read) {
  FlatParameter& flat = *model.flats()[u];
  const auto is_there = [&](const FlatParameter::Parameter& p) {
    return loading.Find(p) != nullptr;
  };
  if (std::none_of(flat.parameters().begin(), flat.parameters().end(),
                   is_there)) {
    return absl::OkStatus();
  }
  absl::StatusOr<FlatBuffer> values = absl::UnknownError("not read");
  const absl::Status agreed = RunTogether(model.comm(), kWhere, [&] {
    values = ReadOwned(loading, &flat);
    return values.status();
  });
  *could_read = agreed.ok();
  TESSERA_RETURN_IF_ERROR(agreed);
  return CatchTorch(kWhere, [&]() -> absl::Status {
    TESSERA_RETURN_IF_ERROR(SetMasters(&flat, values->View()));
    std::vector<bool> changed;
    for (const FlatParameter::Parameter& p : flat.parameters()) {
      changed.push_back(is_there(p));
    }
    return flat.PublishOwned({.parameters = std::move(changed)});
  });
}

// All flats and plain values. COLLECTIVE.
absl::Status LoadAll(const Loading& loading, UpdateGuard* guard) {
  ExclusiveScope exclusive(guard, kWhere);
  TESSERA_RETURN_IF_ERROR(exclusive.Begin());
  bool could_read = true;
  for (size_t u = 0; u < guard->model().flats().size(); ++u) {
    const absl::Status status =
        LoadFlat(loading, guard->model(), u, &could_read);
    if (status.ok()) continue;
    if (could_read) {
      guard->FailTiers(status);
      return exclusive.Fail(status);
    }
    if (u == 0) return exclusive.Commit(status);
    return exclusive.Commit(absl::Status(
        status.code(), absl::StrCat(status.message(), "; units before [",
                                    guard->model().flats()[u]->name(),
                                    "] have the file's values already")));
  }
  const absl::Status written = CatchTorch(kWhere, [&] {
    TorchScope scope;
    for (const auto& [to, values] : loading.plain) to.copy_(values);
  });
  return written.ok() ? exclusive.Commit() : exclusive.Fail(written);
}

}  // namespace

absl::StatusOr<LoadSafetensorsReport> LoadSafetensors(
    UpdateGuard* guard, const std::string& path,
    const LoadSafetensorsOptions& options) {
  TESSERA_RETURN_IF_ERROR(guard->life().CheckOpen());
  TESSERA_RETURN_IF_ERROR(guard->life().CheckNotAveraged());
  // What is asked for here is gone when it returns, and plans do not count it.
  const NoMemoryLimit unlimited(&LedgerOf(guard->model().device()));
  Communicator* const comm = guard->comm();
  Loading loading;
  TESSERA_RETURN_IF_ERROR(
      RunTogether(comm, kWhere, [&] { return OpenFiles(path, &loading); }));
  const absl::Status planned = CatchTorch(
      kWhere, [&] { return PlanLoading(guard->model(), options, &loading); });
  TESSERA_RETURN_IF_ERROR(RunTogether(comm, kWhere, [&] {
    return planned.ok() ? ReadPlain(guard->model(), &loading) : planned;
  }));
  TESSERA_RETURN_IF_ERROR(
      CheckSame(loading.print, "safetensors file, or its options,", comm));
  TESSERA_RETURN_IF_ERROR(CheckTies(guard->model(), options.strict, &loading));
  TESSERA_RETURN_IF_ERROR(LoadAll(loading, guard));
  LoadSafetensorsReport report;
  report.missing = loading.plan.missing;
  report.unexpected = loading.plan.unexpected;
  report.bytes_read = loading.file->bytes_read();
  return report;
}

}  // namespace tessera
