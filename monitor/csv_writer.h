// CsvWriter writes a file for each scalar, in the layout of DeepSpeed's
// csv_monitor:
//
//   FOLDER/Train_Samples_train_loss.csv      the tag; "/" and " " become "_"
//     step,train_loss                        what is behind the tag's last "/"
//     64,2.5                                 samples so far, the value
//     128,nan
//
// DeepSpeed writes that first line again whenever a process opens the file;
// here a file that has lines is continued without it. Python's readers take
// both. Texts and histograms do not fit the format and are left out.
//
// Each tag costs an open file: at most 200 are open at a time, and files beyond
// that are opened for each line.
#ifndef MONITOR_CSV_WRITER_H_
#define MONITOR_CSV_WRITER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "monitor/metrics_writer.h"

namespace tessera {

// Creates `folder`, and checks that it can be written to.
absl::StatusOr<std::unique_ptr<MetricsWriter>> OpenCsvWriter(
    const std::string& folder);

// Returns the name of a tag's file, without the folder.
std::string CsvFileName(absl::string_view tag);

}  // namespace tessera
#endif  // MONITOR_CSV_WRITER_H_
