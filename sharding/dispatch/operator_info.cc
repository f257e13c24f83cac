#include "sharding/dispatch/operator_info.h"

#include <memory>
#include <string>
#include <unordered_map>

#include "base/torch/aten_names.h"

namespace tessera {
namespace {

// Operators that return no alias of their arguments and still read no values
// of them, or none of a particular argument (type_as reads its first through an
// inner operator, which is seen).
bool LooksAtSizesOnly(const std::string& name) {
  static const auto* const names = new AtenNames(
      "empty_like,zeros_like,ones_like,full_like,rand_like,randn_like,"
      "randint_like,new_empty,new_zeros,new_ones,new_full,new_empty_strided,"
      "requires_grad_,retain_grad,is_same_size,type_as,result_type,can_cast,"
      "is_complex,is_floating_point,is_signed,is_neg,is_conj,is_inference,"
      "size,stride,sym_size,sym_stride,sym_numel,sym_storage_offset,_version,"
      "is_leaf,set_data,data,is_pinned");
  return names->Contains(name);
}

bool OverwritesFirst(const std::string& name) {
  static const auto* const names = new AtenNames(
      "zero_,fill_,uniform_,normal_,random_,copy_,exponential_,geometric_,"
      "log_normal_,cauchy_,bernoulli_");
  return names->Contains(name);
}

bool ReturnsView(const c10::FunctionSchema& schema) {
  for (const auto& ret : schema.returns()) {
    if (ret.alias_info() != nullptr && !ret.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

// Operators that update running statistics in training. Of 2.11's schemas those
// of the last two alone say so.
bool UpdatesStatistics(const std::string& name) {
  static const auto* const names = new AtenNames(
      "batch_norm,native_batch_norm,cudnn_batch_norm,miopen_batch_norm,"
      "instance_norm,_batch_norm_impl_index,batch_norm_gather_stats,"
      "batch_norm_gather_stats_with_counts,batch_norm_update_stats,"
      "_native_batch_norm_legit,_batch_norm_with_update");
  return names->Contains(name);
}

// instance_norm's use_input_stats is no such flag: it writes in any case.
void FindStatistics(const c10::FunctionSchema& schema, OperatorInfo* info) {
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& name = arguments[i].name();
    info->statistics.push_back(name == "running_mean" || name == "running_var");
    if (name == "training") info->updates = static_cast<int>(i);
  }
}

// Kernels of attention draw, and not all have the tag.
bool HasDropout(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments()) {
    if (argument.name().find("dropout") != std::string::npos) return true;
  }
  return false;
}

OperatorInfo Classify(const c10::FunctionSchema& schema) {
  OperatorInfo info;
  const std::string& name = schema.name();
  info.name = name;
  info.aten = name.compare(0, 6, "aten::") == 0;
  info.c10d = name.compare(0, 6, "c10d::") == 0 ||
              name.compare(0, 18, "_c10d_functional::") == 0;
  info.copies = name == "aten::_to_copy";
  info.overwrites = OverwritesFirst(name);
  info.input_casts = InputCastsOf(name);
  if (name == "aten::set_") {
    info.kind = OperatorInfo::Kind::kSet;
  } else if (name == "aten::_has_compatible_shallow_copy_type") {
    info.kind = OperatorInfo::Kind::kSetData;
  } else if (info.aten && (ReturnsView(schema) || LooksAtSizesOnly(name))) {
    info.kind = OperatorInfo::Kind::kTransparent;
  }
  info.promises =
      !info.aten && !info.c10d &&
      schema.aliasAnalysis() != c10::AliasAnalysisKind::CONSERVATIVE;
  for (const auto& arg : schema.arguments()) {
    const auto* alias = arg.alias_info();
    info.writes.push_back(!(info.aten || info.promises) ||
                          (alias != nullptr && alias->isWrite()));
  }
  if (UpdatesStatistics(name)) FindStatistics(schema, &info);
  return info;
}

}  // namespace

const OperatorInfo& OperatorInfo::Of(const c10::OperatorHandle& op) {
  // Keyed by the schema's address; the name guards against one that was
  // unloaded and another that took its place.
  struct Entry {
    std::string name, overload;
    OperatorInfo info;
  };
  thread_local std::unordered_map<const c10::FunctionSchema*,
                                  std::unique_ptr<Entry>>
      cache;
  const c10::FunctionSchema& schema = op.schema();
  auto& entry = cache[&schema];
  if (entry == nullptr || entry->name != schema.name() ||
      entry->overload != schema.overload_name()) {
    entry = std::make_unique<Entry>(
        Entry{schema.name(), schema.overload_name(), Classify(schema)});
    entry->info.may_draw = !entry->info.aten ||
                           op.hasTag(at::Tag::nondeterministic_seeded) ||
                           HasDropout(schema);
    entry->info.composite =
        op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  }
  return entry->info;
}

}  // namespace tessera
