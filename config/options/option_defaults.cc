#include "config/options/option_defaults.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "optim/algorithms/algorithm.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;

// As JSON has it.
std::string DefaultText(const FieldDescriptor& field, double value) {
  if (field.cpp_type() != FieldDescriptor::CPPTYPE_BOOL) {
    return absl::StrCat(value);
  }
  return value != 0 ? "true" : "false";
}

// Returns one optimizer's default by the table of optim/algorithms; "" if it
// has no such parameter.
std::string DefaultOf(const FieldDescriptor& field, const AlgorithmRow& row) {
  const auto of = [&](absl::string_view name) -> std::string {
    const Option* const option = row.FindOrRest(name);
    if (option == nullptr) return "";
    return option->value ? DefaultText(field, *option->value) : "its own";
  };
  if (field.name() == "betas") {
    const std::string beta1 = of("beta1");
    return beta1.empty() ? "" : absl::StrCat(beta1, " and ", of("beta2"));
  }
  for (const ConfigField& own : row.fields) {
    if (field.name() != own.name) continue;
    return own.text != nullptr   ? own.text
           : own.like != nullptr ? own.like
                                 : DefaultText(field, own.number);
  }
  return of(field.name());
}

}  // namespace

std::string DefaultsOfOptimizers(const FieldDescriptor& field) {
  std::vector<std::pair<std::string, std::vector<std::string>>> defaults;
  for (const std::string& name : AlgorithmNames()) {
    const std::string value = DefaultOf(field, RowOf(*FindAlgorithm(name)));
    if (value.empty()) continue;
    const auto same =
        std::find_if(defaults.begin(), defaults.end(),
                     [&](const auto& each) { return each.first == value; });
    if (same != defaults.end()) {
      same->second.push_back(name);
    } else {
      defaults.push_back({value, {name}});
    }
  }
  return absl::StrJoin(defaults, ", ", [](std::string* out, const auto& each) {
    absl::StrAppend(out, each.first, " (", absl::StrJoin(each.second, ", "),
                    ")");
  });
}

}  // namespace tessera
