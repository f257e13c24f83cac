// What is wrong with a configuration, collected while it is checked.
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

// Paths are of fields' names, as in ReadRecord; faults come out as written and
// with positions, where the record has them. Of paths that the record calls
// doubtful, or that have a fault, none comes out.
class Faults {
 public:
  // `record` is borrowed.
  explicit Faults(const ReadRecord* record) : record_(*record) {}

  template <typename... Args>
  void Add(const std::string& path, const Args&... what) {
    AddText(path, absl::StrCat(what...));
  }

  // What is no fault, and should be known.
  template <typename... Args>
  void Note(const std::string& path, const Args&... what) {
    if (!IsDoubtful(path)) notes_.push_back(At(path, absl::StrCat(what...)));
  }

  // Adds that `name` is none of `names`, with the nearest of them; of `others`,
  // which are known and do not run here, where none of those is near.
  void AddUnknown(const std::string& path, const std::string& name,
                  const char* expected, const std::vector<std::string>& names,
                  const std::vector<std::string>& others = {});
  // Adds a fault for each that is "".
  void CheckNoneEmpty(
      const std::string& path,
      const google::protobuf::RepeatedPtrField<std::string>& values);

  // True if the record doubts the path, something inside or what it is in, or
  // one of these has a fault.
  bool IsDoubtful(absl::string_view path) const;
  // True if a file has the key, whatever its value.
  bool IsWritten(const std::string& path) const;
  // False of a message that was made in code.
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

// True if one path is the other or lies inside of it.
bool PathsOverlap(absl::string_view a, absl::string_view b);

}  // namespace tessera
#endif  // CONFIG_READER_FAULTS_H_
