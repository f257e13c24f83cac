// Finds the files in a tar archive, by one pass over its headers.
//
//   block of 512 bytes   header of a file, its number of bytes in it
//   blocks               its content, filled up to whole blocks
//   ...
//   2 blocks of zeros    the end
//
// It reads POSIX ustar (prefixes of names), pax headers (path, size), GNU's
// long names, numbers in base 256, and the old ones before all of these.
// Sources: POSIX.1-2017, pax; the GNU tar manual, "Basic Tar Format".
//
// libarchive, which Debian has, is not used: it reads an archive as a stream
// and does not say where in it a file's content lies, which is needed here so
// that any sample of a mapped archive can be taken at any time; it continues
// after some kinds of damage; and only one of its dozens of formats is of use.
#ifndef DATA_TAR_TAR_FILE_H_
#define DATA_TAR_TAR_FILE_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace tessera {

struct TarMember {
  std::string name;    // as in the archive, folders included
  int64_t header = 0;  // byte of the archive where its first header begins
  int64_t begin = 0;   // where its content begins
  int64_t size = 0;    // bytes of the content
};

// Calls `use` for each regular file in the order of the archive, skipping
// folders, links and devices. Returns the first error of `use`, DataLoss naming
// `path` and byte where a header's sum or a number is wrong, or a member or the
// end is missing (the archive is truncated), and Unimplemented for a sparse
// file.
absl::Status ForEachTarMember(
    absl::Span<const uint8_t> archive, absl::string_view path,
    absl::FunctionRef<absl::Status(const TarMember&)> use);

}  // namespace tessera
#endif  // DATA_TAR_TAR_FILE_H_
