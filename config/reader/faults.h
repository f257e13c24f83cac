// Collects what is wrong with a configuration while it is checked.
#ifndef CONFIG_READER_FAULTS_H_
#define CONFIG_READER_FAULTS_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "config/reader/proto_reader.h"
#include "google/protobuf/repeated_field.h"

namespace tessera {

// Paths consist of field names, as in ReadRecord. Faults are reported with
// paths as written and with positions, where the record has them. A path that
// the record calls doubtful, or that has a fault already, gets no further
// fault.
class Faults {
 public:
  // `record` is borrowed.
  explicit Faults(const ReadRecord* record) : record_(*record) {}

  template <typename... Args>
  void Add(const std::string& path, const Args&... what) {
    AddText(path, absl::StrCat(what...));
  }

  // Adds something that is no fault but should be known.
  template <typename... Args>
  void Note(const std::string& path, const Args&... what) {
    if (!IsDoubtful(path)) notes_.push_back(At(path, absl::StrCat(what...)));
  }

  // Adds a fault: `name` is none of `names`. It offers the nearest of them, or,
  // if none is near, the nearest of `others`, which are known but not supported
  // here.
  void AddUnknown(const std::string& path, const std::string& name,
                  const char* expected, const std::vector<std::string>& names,
                  const std::vector<std::string>& others = {});
  // Adds a fault for each empty value.
  void CheckNoneEmpty(
      const std::string& path,
      const google::protobuf::RepeatedPtrField<std::string>& values);

  // Returns whether the path, a path inside it or one around it is doubtful in
  // the record or has a fault.
  bool IsDoubtful(absl::string_view path) const;
  // Returns whether a file has the key, whatever its value.
  bool IsWritten(const std::string& path) const;
  // Returns false for a message that was made in code.
  bool is_of_file() const { return !record_.positions.empty(); }
  std::vector<ConfigFault> Take() { return std::move(faults_); }
  std::vector<ConfigFault> TakeNotes() { return std::move(notes_); }

 private:
  void AddText(const std::string& path, std::string what);
  ConfigFault At(const std::string& path, std::string what) const;

  const ReadRecord& record_;
  std::vector<std::string> faulty_;  // paths
  std::vector<ConfigFault> faults_;
  std::vector<ConfigFault> notes_;
};

// Returns whether one path is the other or lies inside it.
bool PathsOverlap(absl::string_view a, absl::string_view b);

}  // namespace tessera
#endif  // CONFIG_READER_FAULTS_H_
