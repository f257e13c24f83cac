// The files in a tar archive, by one pass over its headers.
//
//   block of 512 bytes   header of a file, its number of bytes in it
//   blocks               its content, filled up to whole blocks
//   ...
//   2 blocks of zeros    the end
//
// Formats: POSIX ustar (prefixes of names), pax headers (path, size), GNU's
// long names, numbers in base 256, and the old ones before all of these.
// Sources: POSIX.1-2017, pax; the GNU tar manual, "Basic Tar Format".
//
// Why not libarchive, which Debian has: it reads an archive as a stream and
// does not say where in it a file's content lies, but that is what is wanted
// here, so that any sample of a mapped archive can be taken at any time; it
// goes on behind some kinds of damage; and of its dozens of formats one is of
// use.
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
  std::string name;    // as it stands there, folders included
  int64_t header = 0;  // byte of the archive where its first header begins
  int64_t begin = 0;   // where its content does
  int64_t size = 0;    // bytes of it
};

// Calls `use` for each regular file in the order of the archive; folders, links
// and devices are passed over. Ends with the first error of `use`, or with
// DataLoss naming `path` and byte where a header's sum is wrong, a number is
// none, a member or the end is missing (the archive is truncated);
// Unimplemented for a sparse file.
absl::Status ForEachTarMember(
    absl::Span<const uint8_t> archive, absl::string_view path,
    absl::FunctionRef<absl::Status(const TarMember&)> use);

}  // namespace tessera
#endif  // DATA_TAR_TAR_FILE_H_
