// Files that nobody but this process's user has anything to do with. No torch.
#ifndef COMM_CONNECT_PRIVATE_FILE_H_
#define COMM_CONNECT_PRIVATE_FILE_H_

#include <sys/stat.h>

#include <string>

namespace tessera {

// Why others may have something to do with a file, or "".
std::string WhyNotPrivate(const struct stat& file);

}  // namespace tessera
#endif  // COMM_CONNECT_PRIVATE_FILE_H_
