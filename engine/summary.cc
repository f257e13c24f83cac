#include "engine/summary.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "base/page/page_numbers.h"
#include "c10/core/ScalarType.h"
#include "engine/engine.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

constexpr size_t kColumns = 6;
using Line = std::array<std::string, kColumns>;
constexpr size_t kNumber = 2;  // is aligned to the right
constexpr size_t kUnit = 5;

// "41.6 MiB"
std::string Bytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
  auto number = static_cast<double>(bytes);
  size_t unit = 0;
  for (; number >= 1024 && unit + 1 < std::size(kUnits); ++unit) number /= 1024;
  return unit == 0 ? absl::StrCat(bytes, " bytes")
                   : absl::StrFormat("%.1f %s", number, kUnits[unit]);
}

// "LinearImpl" of torch::nn is Linear, to those who write programs.
std::string ClassOf(const torch::nn::Module& module) {
  absl::string_view name = module.name();
  if (const size_t at = name.rfind("::");
      at != name.npos && !absl::StrContains(name, '<')) {
    name.remove_prefix(at + 2);
  }
  absl::ConsumeSuffix(&name, "Impl");
  return std::string(name);
}

// What is said of a number of parameters.
struct Sums {
  void Add(const at::Tensor& parameter) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) return;
    numel += parameter.numel();
    bytes += static_cast<int64_t>(parameter.element_size()) * parameter.numel();
    if (!parameter.requires_grad()) frozen += parameter.numel();
    any_frozen |= !parameter.requires_grad();
    any_trainable |= parameter.requires_grad();
    dtypes.insert(c10::getDtypeNames(parameter.scalar_type()).first);
  }

  std::set<const void*> seen;
  int64_t numel = 0, bytes = 0, frozen = 0;
  bool any_frozen = false, any_trainable = false;
  std::set<std::string> dtypes;
};

class Table {
 public:
  explicit Table(const SummaryOptions& options) : options_(options) {
    lines_.push_back(
        {"module", "class", "parameters", "dtype", "frozen", "unit"});
  }

  void Add(const torch::nn::Module& module, const std::string& path,
           const std::string& name, int depth) {
    Sums sums;
    std::set<std::string> units;
    for (const auto& item : module.named_parameters()) {
      if (!item.value().defined()) continue;
      sums.Add(item.value());
      AddUnit(path, item.key(), &units);
    }
    lines_.push_back(
        {absl::StrCat(std::string(static_cast<size_t>(2 * depth), ' '), name),
         ClassOf(module), sums.numel == 0 ? "" : CountText(sums.numel),
         absl::StrJoin(sums.dtypes, ", "),
         !sums.any_frozen     ? ""
         : sums.any_trainable ? "part"
                              : "yes",
         units.size() > 2 ? absl::StrCat(units.size(), " units")
                          : absl::StrJoin(units, ", ")});
    if (options_.depth >= 0 && depth >= options_.depth) return;
    for (const auto& child : module.named_children()) {
      Add(*child.value(),
          path.empty() ? child.key() : absl::StrCat(path, ".", child.key()),
          child.key(), depth + 1);
    }
  }

  std::string Text() const {
    std::array<size_t, kColumns> widths = {};
    for (const Line& line : lines_) {
      for (size_t c = 0; c < kColumns; ++c) {
        widths[c] = std::max(widths[c], line[c].size());
      }
    }
    const size_t columns = options_.engine == nullptr ? kUnit : kColumns;
    std::string text;
    for (const Line& line : lines_) {
      std::string row;
      for (size_t c = 0; c < columns; ++c) {
        const std::string gap(widths[c] - line[c].size(), ' ');
        absl::StrAppend(&row, c == 0 ? "" : "  ", c == kNumber ? gap : "",
                        line[c], c == kNumber ? "" : gap);
      }
      absl::StripTrailingAsciiWhitespace(&row);
      absl::StrAppend(&text, row, "\n");
    }
    return text;
  }

 private:
  void AddUnit(const std::string& path, const std::string& name,
               std::set<std::string>* units) const {
    if (options_.engine == nullptr) return;
    const auto unit = options_.engine->UnitOf(
        path.empty() ? name : absl::StrCat(path, ".", name));
    // The engine knows a tied parameter by its first name.
    if (unit.ok()) units->insert(*unit);
  }

  const SummaryOptions& options_;
  std::vector<Line> lines_;
};

}  // namespace

std::string Summary(const torch::nn::Module& module,
                    const SummaryOptions& options) {
  Table table(options);
  table.Add(module, "", "(model)", 0);
  Sums sums;
  for (const at::Tensor& parameter : module.parameters()) {
    if (parameter.defined()) sums.Add(parameter);
  }
  int64_t in_buffers = 0;
  for (const at::Tensor& buffer : module.buffers()) {
    if (buffer.defined()) in_buffers += buffer.numel();
  }
  std::string text = absl::StrCat(
      table.Text(), CountText(sums.numel), " parameters (", Bytes(sums.bytes),
      "): ", CountText(sums.numel - sums.frozen), " trainable, ",
      CountText(sums.frozen), " frozen; ", CountText(in_buffers),
      " numbers in buffers\n");
  if (const Engine* const engine = options.engine; engine != nullptr) {
    absl::StrAppend(&text, "stage ", engine->stage(), ": this rank holds ",
                    Bytes(engine->state_bytes().total()),
                    " of model states between uses; without sharding it would "
                    "hold ",
                    Bytes(engine->replicated_state_bytes().total()), "\n");
  }
  return text;
}

}  // namespace tessera
