#include "engine/checkpoint/safetensors_plan.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/bits.h"
#include "base/edit_distance.h"
#include "base/status.h"
#include "torch/nn/module.h"

namespace tessera {
namespace {

constexpr size_t kMaxNamesTold = 8;

// Tied tensors are one, with all its names.
struct Named {
  at::Tensor tensor;
  std::vector<std::string> names;
};

template <typename Dict>
void AddAll(const Dict& dict, std::vector<Named>* all) {
  absl::flat_hash_map<const void*, size_t> seen;
  for (const auto& entry : dict) {
    const at::Tensor& tensor = entry.value();
    if (!tensor.defined()) continue;
    const auto [place, first] =
        seen.try_emplace(tensor.unsafeGetTensorImpl(), all->size());
    if (first) all->push_back({tensor, {}});
    (*all)[place->second].names.push_back(entry.key());
  }
}

std::string SizesText(at::IntArrayRef sizes) {
  return absl::StrCat("[", absl::StrJoin(sizes, ", "), "]");
}

// Values go over without a change of what kind of number they are.
absl::string_view KindOf(at::ScalarType dtype) {
  return c10::isComplexType(dtype)       ? "complex numbers"
         : c10::isFloatingType(dtype)    ? "floating-point numbers"
         : dtype == at::ScalarType::Bool ? "booleans"
                                         : "integers";
}

// What of the file does not fit the tensor; "" if it does.
std::string MisfitOf(const SafetensorsMatch& match, const std::string& where) {
  const SafetensorsTensor& source = *match.source;
  const at::ScalarType dtype = match.tensor.scalar_type();
  if (DtypeOf(source) == at::ScalarType::Undefined) {
    return absl::StrCat(where, ": dtype ", source.dtype_name,
                        " is none that libtorch has");
  }
  std::vector<int64_t> sizes = match.tensor.sizes().vec();
  if (match.transposed) std::reverse(sizes.begin(), sizes.end());
  if (sizes != source.sizes || (match.transposed && sizes.size() != 2)) {
    return absl::StrCat(where, ": expected sizes ", SizesText(sizes), " for '",
                        match.name, match.transposed ? "', transposed" : "'",
                        ", got ", SizesText(source.sizes));
  }
  if (KindOf(dtype) != KindOf(DtypeOf(source))) {
    return absl::StrCat(where, ": expected ", KindOf(dtype), " for '",
                        match.name, "' (", c10::toString(dtype), "), got ",
                        source.dtype_name);
  }
  return "";
}

constexpr char kOneHere[] =
    " are one tensor in the module (tied): remove one of them from the file, "
    "or "
    "untie them in the module; strict = false takes the first";

std::string Listed(const std::vector<std::string>& names) {
  std::vector<std::string> told;
  for (size_t i = 0; i < std::min(names.size(), kMaxNamesTold); ++i) {
    told.push_back(QuotedName(names[i]));
  }
  if (names.size() > told.size()) {
    told.push_back(absl::StrCat(names.size() - told.size(), " more"));
  }
  return absl::StrJoin(told, ", ");
}

class Planner {
 public:
  Planner(const Safetensors& file, const LoadSafetensorsOptions& options)
      : file_(file), options_(options) {}

  // Finds it under the first of its names that the file has.
  void Add(const Named& named) {
    bool expected = false;
    bool transposed = false;
    const SafetensorsTensor* source = nullptr;
    for (const std::string& name : named.names) {
      const NameMap::Name mapped = options_.names.Theirs(name);
      std::string theirs = options_.file_name == nullptr
                               ? mapped.name
                               : options_.file_name(name);
      if (theirs.empty()) continue;
      expected = true;
      theirs = absl::StrCat(options_.prefix, theirs);
      const SafetensorsTensor* const found = file_.Find(theirs);
      if (found == nullptr) continue;
      used_.insert(found);
      const bool is_transposed =
          options_.file_name == nullptr && mapped.transposed;
      if (source != nullptr) {
        if (found != source) AddTie(source, found, transposed == is_transposed);
        continue;
      }
      source = found;
      transposed = is_transposed;
    }
    if (source == nullptr) {
      if (expected) plan_.missing.push_back(named.names[0]);
      return;
    }
    plan_.matches.push_back({named.names[0], named.tensor, source, transposed});
    std::string misfit =
        MisfitOf(plan_.matches.back(), file_.Describe(*source));
    if (!misfit.empty()) faults_.push_back(std::move(misfit));
  }

  absl::StatusOr<SafetensorsPlan> Finish(const std::string& path) {
    for (const SafetensorsTensor& tensor : file_.tensors()) {
      if (absl::StartsWith(tensor.name, options_.prefix) &&
          !used_.contains(&tensor)) {
        plan_.unexpected.push_back(tensor.name);
      }
    }
    if (options_.strict) AddNameFaults(path);
    if (faults_.empty()) return std::move(plan_);
    if (faults_.size() > kMaxNamesTold) {
      const size_t more = faults_.size() - kMaxNamesTold;
      faults_.resize(kMaxNamesTold);
      faults_.push_back(absl::StrCat(more, " more"));
    }
    return absl::InvalidArgumentError(absl::StrJoin(faults_, "; "));
  }

 private:
  // What they hold is compared by who reads it.
  void AddTie(const SafetensorsTensor* used, const SafetensorsTensor* other,
              bool same_order) {
    if (same_order && used->sizes == other->sizes &&
        used->dtype_name == other->dtype_name) {
      plan_.ties.push_back({used, other});
      return;
    }
    const auto text = [](const SafetensorsTensor& tensor) {
      return absl::StrCat(tensor.dtype_name, " ", SizesText(tensor.sizes));
    };
    std::string fault =
        absl::StrCat(file_.Describe(*used), ", ", text(*used), ", and ",
                     QuotedName(other->name), ", ", text(*other),
                     same_order ? "" : ", one of them transposed,", kOneHere);
    if (options_.strict) {
      faults_.push_back(std::move(fault));
    } else {
      plan_.unexpected.push_back(other->name);
      plan_.notes.push_back(std::move(fault));
    }
  }

  void AddNameFaults(const std::string& path) {
    constexpr char kHint[] =
        "map names by LoadSafetensorsOptions::names, prefix or file_name, or "
        "set strict = false";
    if (!plan_.missing.empty()) {
      const std::string near = NearestName(
          absl::StrCat(options_.prefix, plan_.missing[0]), plan_.unexpected);
      faults_.push_back(absl::StrCat(
          path, ": has no ", Listed(plan_.missing), " of the module",
          near.empty() ? "" : absl::StrCat(" (is it ", QuotedName(near), "?)"),
          "; ", kHint));
    }
    if (!plan_.unexpected.empty()) {
      faults_.push_back(absl::StrCat(path, ": the module has no ",
                                     Listed(plan_.unexpected), " of the file",
                                     plan_.missing.empty() ? "; " : "",
                                     plan_.missing.empty() ? kHint : ""));
    }
  }

  const Safetensors& file_;
  const LoadSafetensorsOptions& options_;
  absl::flat_hash_set<const SafetensorsTensor*> used_;
  std::vector<std::string> faults_;
  SafetensorsPlan plan_;
};

}  // namespace

absl::StatusOr<SafetensorsPlan> PlanSafetensors(
    const torch::nn::Module& module, const Safetensors& file,
    const LoadSafetensorsOptions& options) {
  std::vector<Named> all;
  AddAll(module.named_parameters(), &all);
  AddAll(module.named_buffers(), &all);
  Planner planner(file, options);
  for (const Named& named : all) planner.Add(named);
  return planner.Finish(file.path());
}

absl::Status CompareTie(const Safetensors& file, const SafetensorsTie& tie,
                        int part, int parts) {
  constexpr int64_t kAtOnce = 1 << 20;
  const int64_t bytes = tie.used->bytes;
  const int64_t end =
      bytes / parts * (part + 1) + (part + 1 == parts ? bytes % parts : 0);
  std::string a, b;
  for (int64_t at = bytes / parts * part; at < end; at += kAtOnce) {
    const int64_t n = std::min(kAtOnce, end - at);
    a.resize(static_cast<size_t>(n));
    b.resize(static_cast<size_t>(n));
    TESSERA_RETURN_IF_ERROR(file.ReadBytes(*tie.used, at, a.data(), n));
    TESSERA_RETURN_IF_ERROR(file.ReadBytes(*tie.other, at, b.data(), n));
    if (a == b) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        file.Describe(*tie.used), " and ", QuotedName(tie.other->name),
        " have other values, and", kOneHere));
  }
  return absl::OkStatus();
}

std::string PrintOf(const SafetensorsPlan& plan) {
  std::string text;
  for (const SafetensorsMatch& match : plan.matches) {
    const SafetensorsTensor& source = *match.source;
    absl::StrAppend(&text, match.name, "|", source.name, "|", source.dtype_name,
                    "|", SizesText(source.sizes),
                    match.transposed ? "t;" : ";");
  }
  for (const SafetensorsTie& tie : plan.ties) {
    absl::StrAppend(&text, tie.used->name, "=", tie.other->name, ";");
  }
  return absl::StrFormat(
      "%d tensors to load, %d missing, %d unexpected, fingerprint %016x",
      static_cast<int>(plan.matches.size()),
      static_cast<int>(plan.missing.size()),
      static_cast<int>(plan.unexpected.size()),
      Fingerprint(text.data(), static_cast<int64_t>(text.size())));
}

}  // namespace tessera
