// What a rank leaves behind when it gives up waiting: a file with the last
// collectives of its communicators and the stacks of all its threads.
#ifndef COMM_RECORD_HANG_DUMP_H_
#define COMM_RECORD_HANG_DUMP_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tessera {

// For all dumps of this process from now on. Empty: what TESSERA_DUMP_FOLDER
// says, or TMPDIR, or /tmp. "off" (in either place): no dumps.
void SetHangDumpFolder(const std::string& folder);

// Writes tessera-hang-rank<rank>-pid<pid>.txt, in the place of one that is
// there. Returns its path; "" if dumps are off, or the file cannot be written
// (logged). Takes a second or two where there are many threads. LOCAL.
std::string WriteHangDump(int rank, absl::string_view reason);

// Writes one, and adds to the message where it is.
absl::Status WithHangDump(int rank, const absl::Status& status);

}  // namespace tessera
#endif  // COMM_RECORD_HANG_DUMP_H_
