// Names that users give for classes, parameters and modules. Text only; knows
// no torch.
//
// Threads: one at a time for each object.
#ifndef SHARDING_PARTITION_NAMES_H_
#define SHARDING_PARTITION_NAMES_H_

#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tessera {

// Returns what follows the last "::" outside of all brackets: "a::(anonymous
// namespace)::List<b::C>" -> "List<b::C>".
absl::string_view LastComponent(absl::string_view class_name);

// ClassNames: classes that a user named, in full ("torch::nn::LinearImpl") or
// by the last component ("Linear"), with or without the "Impl" at the end.
class ClassNames {
 public:
  // `option` is where the names come from, for the error.
  ClassNames(absl::string_view option, const std::vector<std::string>& wanted);
  // Returns whether a class, given by its full name, is one of them. O(its
  // name).
  bool Match(absl::string_view class_name);
  // Returns InvalidArgument if a name has matched nothing, with that name and
  // the classes that were there, most similar first.
  absl::Status CheckMatched(
      const absl::flat_hash_set<std::string>& present) const;

 private:
  std::string option_;
  std::vector<std::string> wanted_;
  absl::flat_hash_map<std::string, bool> matched_;  // keys without "Impl"
};

// PathPatterns: paths that a user named: "embedding", "layers.*.norm?". '*'
// stands for any characters, dots too, '?' for one.
class PathPatterns {
 public:
  PathPatterns(absl::string_view option,
               const std::vector<std::string>& patterns);
  // Returns whether one of them matches this path. O(its length) for each
  // pattern with a wildcard, and once for all others.
  bool Match(absl::string_view path);
  // Returns InvalidArgument with the first pattern that has matched nothing,
  // and the most similar of `present`, paths that were there (at least some):
  // of parameters only, or also of modules.
  absl::Status CheckMatched(const std::vector<std::string>& present,
                            bool of_modules) const;

 private:
  std::string option_;
  std::vector<std::string> patterns_;  // as given
  std::vector<std::string> wild_;
  absl::flat_hash_map<std::string, bool> matched_;
};

// DistinctNames: makes names unique: the second "a" becomes "a (2)".
class DistinctNames {
 public:
  std::string Take(const std::string& name);

 private:
  absl::flat_hash_map<std::string, int> taken_;  // how often
};

}  // namespace tessera
#endif  // SHARDING_PARTITION_NAMES_H_
