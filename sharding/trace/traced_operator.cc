#include "sharding/trace/traced_operator.h"

#include "absl/strings/str_cat.h"
#include "base/torch/aten_names.h"

namespace tessera {
namespace {

bool LooksAtValues(const std::string& name) {
  static const auto* const names = new AtenNames(
      "_local_scalar_dense,nonzero,masked_select,_unique,_unique2,unique_dim,"
      "unique_consecutive,unique_dim_consecutive,bincount,repeat_interleave,"
      "_ctc_loss");
  return names->Contains(name);
}

bool ReturnsAlias(const c10::FunctionSchema& schema) {
  bool alias = false;
  for (const auto& arg : schema.arguments()) {
    const auto* info = arg.alias_info();
    if (info == nullptr) continue;
    if (info->isWrite()) return false;
    alias = true;
  }
  return alias;
}

// A kernel of meta is believed before one that is made of others, which may
// look at data (copy_).
TracedOperator::Kind KindOf(const c10::OperatorHandle& op,
                            const TracedOperator& traced) {
  using Kind = TracedOperator::Kind;
  using Key = c10::DispatchKey;
  const auto has = [&](Key key) { return op.hasKernelForDispatchKey(key); };
  const std::string& name = traced.name();
  if (traced.rule != nullptr) return Kind::kSizes;
  if (name == "aten::equal") return Kind::kEqual;
  if (LooksAtValues(name)) return Kind::kValues;
  if (name == "aten::set_") return Kind::kView;
  // These make a sparse tensor of dense ones, which is no more than the dense
  // ones.
  if (name.rfind("aten::_sparse_coo", 0) == 0) return Kind::kComposite;
  if (traced.info->aten && has(Key::CPU) && ReturnsAlias(op.schema())) {
    return Kind::kView;
  }
  if (has(Key::Meta)) return Kind::kSizes;
  const bool composite = has(Key::CompositeImplicitAutograd) ||
                         has(Key::CompositeExplicitAutograd) ||
                         has(Key::CompositeExplicitAutogradNonFunctional);
  return composite && !has(Key::CPU) ? Kind::kComposite : Kind::kZeros;
}

}  // namespace

TracedOperator TracedOperator::Of(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  TracedOperator traced;
  traced.info = &OperatorInfo::Of(op);
  traced.arguments = schema.arguments().size();
  traced.returns = schema.returns().size();
  for (size_t i = 0; i < traced.arguments; ++i) {
    if (schema.arguments()[i].name() == "device") {
      traced.device = static_cast<int>(i);
    }
  }
  const std::string name =
      schema.overload_name().empty()
          ? schema.name()
          : absl::StrCat(schema.name(), ".", schema.overload_name());
  traced.rule = FindShapeRule(name);
  traced.if_large = FindShapeRule(absl::StrCat(name, " if large"));
  traced.kind = KindOf(op, traced);
  return traced;
}

}  // namespace tessera
