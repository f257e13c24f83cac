#include "config/options/option_values.h"

#include <vector>

#include "google/protobuf/descriptor.h"
#include "optim/algorithms/algorithm.h"

namespace tessera {

using google::protobuf::FieldDescriptor;

OptionValues OptionValuesOf(const google::protobuf::Message& params) {
  const google::protobuf::Reflection& reflection = *params.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(params, &fields);
  OptionValues values;
  for (const FieldDescriptor* field : fields) {
    if (field->is_repeated()) {
      if (field->name() != "betas" ||
          reflection.FieldSize(params, field) != 2) {
        continue;
      }
      values.emplace_back("beta1",
                          reflection.GetRepeatedDouble(params, field, 0));
      values.emplace_back("beta2",
                          reflection.GetRepeatedDouble(params, field, 1));
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE) {
      values.emplace_back(field->name(), reflection.GetDouble(params, field));
    } else if (field->cpp_type() == FieldDescriptor::CPPTYPE_BOOL) {
      values.emplace_back(field->name(),
                          reflection.GetBool(params, field) ? 1 : 0);
    }
  }
  return values;
}

void ReadOptions(const google::protobuf::Message& params, bool defaults,
                 OptimizerOptions* options) {
  const AlgorithmRow& row = RowOf(options->algorithm);
  for (const Option& option : row.options) {
    if (defaults) option.Set(option.value.value_or(0), options);
  }
  for (const auto& [name, value] : OptionValuesOf(params)) {
    if (const Option* const option = row.Find(name))
      option->Set(value, options);
  }
}

}  // namespace tessera
