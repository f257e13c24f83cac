// What is wrong with a configuration, collected while it is checked.
#ifndef CONFIG_FAULTS_H_
#define CONFIG_FAULTS_H_

#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "config/proto_reader.h"
#include "google/protobuf/repeated_field.h"

namespace tessera {

// Paths are of fields' names, as in ReadRecord; faults come out as written and
// with positions, where the record has them. Of paths that the record calls
// doubtful none comes out.
class Faults {
 public:
  // `record` is borrowed.
  explicit Faults(const ReadRecord* record) : record_(*record) {}

  template <typename... Args>
  void Add(const std::string& path, const Args&... what) {
    AddText(path, absl::StrCat(what...));
  }

  // Each adds a fault if the value is not as it says.
  void CheckAtLeast(const std::string& path, int64_t value, int64_t least);
  void CheckAtLeast0(const std::string& path, double value);  // and finite
  void CheckAbove0(const std::string& path, double value);    // and finite
  void CheckOneOf(const std::string& path, const std::string& value,
                  std::initializer_list<absl::string_view> words);
  void CheckNoneEmpty(
      const std::string& path,
      const google::protobuf::RepeatedPtrField<std::string>& values);

  // True if the record doubts the path, something inside or what it is in.
  bool IsDoubtful(absl::string_view path) const;
  // True if a file has the key, whatever its value.
  bool IsWritten(const std::string& path) const;
  size_t count() const { return faults_.size(); }
  std::vector<ConfigFault> Take() { return std::move(faults_); }

 private:
  void AddText(const std::string& path, std::string what);

  const ReadRecord& record_;
  std::vector<ConfigFault> faults_;
};

// True if one path is the other or lies inside of it.
bool PathsOverlap(absl::string_view a, absl::string_view b);

}  // namespace tessera
#endif  // CONFIG_FAULTS_H_
