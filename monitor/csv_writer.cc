#include "monitor/csv_writer.h"

#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/file.h"
#include "base/page/number_text.h"
#include "base/status.h"
#include "monitor/append_file.h"

namespace tessera {
namespace {

constexpr size_t kMaxOpen = 200;

// Quotes as Python's csv module does.
std::string Field(absl::string_view text) {
  const bool plain = text.find_first_of(",\"\r\n") == absl::string_view::npos;
  if (plain) return std::string(text);
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
}

std::string Leaf(absl::string_view tag) {
  const size_t slash = tag.rfind('/');
  return std::string(slash == absl::string_view::npos ? tag
                                                      : tag.substr(slash + 1));
}

class CsvWriter : public MetricsWriter {
 public:
  explicit CsvWriter(std::string folder) : folder_(std::move(folder)) {}

  absl::Status Write(const StepMetrics& metrics) override {
    absl::Status first;
    for (const StepMetrics::Scalar& scalar : metrics.scalars) {
      first.Update(Add(scalar, metrics.samples));
    }
    return first;
  }

  absl::Status Flush() override {
    absl::Status first;
    for (auto& [name, file] : open_) first.Update(file.Sync());
    return first;
  }

 private:
  absl::Status Add(const StepMetrics::Scalar& scalar, int64_t samples) {
    const std::string name = CsvFileName(scalar.tag);
    const std::string line =
        absl::StrCat(samples, ",", NumberText(scalar.value), "\n");
    const auto found = open_.find(name);
    if (found != open_.end()) return found->second.Append(line);
    TESSERA_ASSIGN_OR_RETURN(AppendFile file,
                             AppendFile::Open(JoinPath(folder_, name)));
    std::string begin;
    if (file.bytes_before() == 0) {
      begin = absl::StrCat("step,", Field(Leaf(scalar.tag)), "\n");
    } else if (file.has_torn_line()) {
      begin = "\n";
    }
    TESSERA_RETURN_IF_ERROR(file.Append(absl::StrCat(begin, line)));
    if (open_.size() < kMaxOpen) open_.emplace(name, std::move(file));
    return absl::OkStatus();
  }

  const std::string folder_;
  std::map<std::string, AppendFile> open_;  // by name
};

}  // namespace

std::string CsvFileName(absl::string_view tag) {
  return absl::StrCat(absl::StrReplaceAll(tag, {{"/", "_"}, {" ", "_"}}),
                      ".csv");
}

absl::StatusOr<std::unique_ptr<MetricsWriter>> OpenCsvWriter(
    const std::string& folder) {
  TESSERA_RETURN_IF_ERROR(MakeFolders(folder));
  const std::string here = folder.empty() ? "." : folder;
  if (::access(here.c_str(), W_OK | X_OK) != 0) return FileError(errno, here);
  return std::make_unique<CsvWriter>(folder);
}

}  // namespace tessera
