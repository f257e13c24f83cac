// What a rank leaves behind when it gives up waiting: a file with the last
// collectives of its communicators and the stacks of all its threads.
#ifndef COMM_RECORD_HANG_DUMP_H_
#define COMM_RECORD_HANG_DUMP_H_

#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace tessera {

// For all dumps of this process from now on. Empty: what TESSERA_DUMP_FOLDER
// says, or TMPDIR, or /tmp. "off" (in either place): no dumps.
void SetHangDumpFolder(const std::string& folder);

// Writes tessera-hang-rank<rank>-pid<pid>.txt, in the place of one that is
// there, and adds to the message where it is; `status` as it is if dumps are
// off, or the file cannot be written (logged). Takes a second or two where
// there are many threads. A folder that does not answer is waited for a while
// only: the thread that writes is left to itself then. LOCAL.
absl::Status WithHangDump(int rank, const absl::Status& status);

// How files are written from now on.
struct HangDumpWriter {
  // Returns 0, or errno. Null: as it is done without tests.
  std::function<int(const std::string& path, const std::string& text)> write;
  absl::Duration patience = absl::Seconds(2);
};
void SetHangDumpWriterForTesting(const HangDumpWriter& writer);

}  // namespace tessera
#endif  // COMM_RECORD_HANG_DUMP_H_
