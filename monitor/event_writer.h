// EventWriter writes TensorBoard's event files.
//
//   FOLDER/events.out.tfevents.TIME.HOST.PID.NUMBER
//
// Each writer begins a file of its own, which TensorBoard reads with the others
// of the folder as one run. A step has one event, at its number of samples:
// scalars (rounded to float32, as TensorBoard stores them), histograms, and
// texts under TAG/text_summary. record_framing.h has the records' format.
#ifndef MONITOR_EVENT_WRITER_H_
#define MONITOR_EVENT_WRITER_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "monitor/metrics_writer.h"

namespace tessera {

// Creates `folder`.
absl::StatusOr<std::unique_ptr<MetricsWriter>> OpenEventWriter(
    const std::string& folder);

}  // namespace tessera
#endif  // MONITOR_EVENT_WRITER_H_
