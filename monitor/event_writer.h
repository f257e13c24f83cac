// EventWriter: TensorBoard's event files.
//
//   FOLDER/events.out.tfevents.TIME.HOST.PID.NUMBER
//
// Each writer begins a file of its own, which TensorBoard reads with the others
// of the folder as one run. An event for each step, at its number of samples:
// scalars (rounded to float32, as TensorBoard has them), histograms, and texts
// under TAG/text_summary. Records: record_framing.h.
#ifndef MONITOR_EVENT_WRITER_H_
#define MONITOR_EVENT_WRITER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "monitor/metrics_writer.h"

namespace tessera {

// `folder` is made.
absl::StatusOr<std::unique_ptr<MetricsWriter>> OpenEventWriter(
    const std::string& folder);

}  // namespace tessera
#endif  // MONITOR_EVENT_WRITER_H_
