#include "comm/connect/private_file.h"

#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace tessera {

std::string WhyNotPrivate(const struct stat& file) {
  if (S_ISLNK(file.st_mode)) return "it is a symbolic link";
  if (!S_ISREG(file.st_mode)) return "it is no plain file";
  if (file.st_uid != geteuid()) {
    return absl::StrCat("it belongs to user ", file.st_uid,
                        ", this process to user ", geteuid());
  }
  const unsigned others = file.st_mode & (S_IRWXG | S_IRWXO);
  if (others == 0) return "";
  return absl::StrFormat("other users may open it (mode %04o)",
                         file.st_mode & 07777);
}

}  // namespace tessera
