#include "config/auto_values.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/edit_distance.h"
#include "base/status.h"
#include "config/reader/decimal.h"

namespace tessera {
namespace {

bool ParseValue(absl::string_view text, std::optional<int64_t>* value) {
  int64_t number = 0;
  if (!absl::SimpleAtoi(text, &number)) return false;
  *value = number;
  return true;
}
bool ParseValue(absl::string_view text, std::optional<double>* value) {
  double number = 0;
  if (ReadDecimal(text, &number) != Decimal::kRight || !std::isfinite(number)) {
    return false;
  }
  *value = number;
  return true;
}
bool ParseValue(absl::string_view text, std::optional<bool>* value) {
  bool boolean = false;
  if (!absl::SimpleAtob(text, &boolean)) return false;
  *value = boolean;
  return true;
}

const char* KindOf(const std::optional<int64_t>&) { return "an integer"; }
const char* KindOf(const std::optional<double>&) {
  return "a finite number that a double holds";
}
const char* KindOf(const std::optional<bool>&) { return "true or false"; }

// Calls visit(name, member) for each value.
template <typename Values, typename Visit>
void ForEach(Values& values, const Visit& visit) {
  visit("per_device_train_batch_size", values.per_device_train_batch_size);
  visit("gradient_accumulation_steps", values.gradient_accumulation_steps);
  visit("learning_rate", values.learning_rate);
  visit("adam_beta1", values.adam_beta1);
  visit("adam_beta2", values.adam_beta2);
  visit("adam_epsilon", values.adam_epsilon);
  visit("weight_decay", values.weight_decay);
  visit("max_grad_norm", values.max_grad_norm);
  visit("warmup_steps", values.warmup_steps);
  visit("max_steps", values.max_steps);
  visit("bf16", values.bf16);
  visit("fp16", values.fp16);
  visit("hidden_size", values.hidden_size);
}

absl::Status UnknownName(absl::string_view name) {
  std::vector<std::string> names;
  AutoValues values;
  ForEach(values,
          [&](const char* known, const auto&) { names.push_back(known); });
  const std::string nearest = NearestName(name, names);
  return absl::InvalidArgumentError(absl::StrCat(
      "auto value '", name, "': unknown; ",
      nearest.empty() ? absl::StrCat("there are ", absl::StrJoin(names, ", "))
                      : absl::StrCat("did you mean '", nearest, "'?")));
}

absl::Status Set(absl::string_view name, absl::string_view text,
                 AutoValues* values) {
  absl::Status status = UnknownName(name);
  ForEach(*values, [&](absl::string_view known, auto& value) {
    if (known != name) return;
    if (value.has_value()) {
      status = absl::InvalidArgumentError(
          absl::StrCat("auto value '", name, "' is given twice"));
    } else if (ParseValue(text, &value)) {
      status = absl::OkStatus();
    } else {
      status = absl::InvalidArgumentError(
          absl::StrCat("auto value '", name, "': expected ", KindOf(value),
                       ", got '", text, "'"));
    }
  });
  return status;
}

}  // namespace

absl::StatusOr<AutoValues> AutoValues::Parse(absl::string_view text) {
  AutoValues values;
  for (const absl::string_view item :
       absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(item, absl::MaxSplits('=', 1));
    TESSERA_RETURN_IF_ERROR(Set(absl::StripAsciiWhitespace(parts.first),
                                absl::StripAsciiWhitespace(parts.second),
                                &values));
  }
  return values;
}

}  // namespace tessera
