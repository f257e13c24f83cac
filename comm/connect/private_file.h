// Checks that a file is private to this process's user. No torch.
#ifndef COMM_CONNECT_PRIVATE_FILE_H_
#define COMM_CONNECT_PRIVATE_FILE_H_

#include <sys/stat.h>

#include <string>

namespace tessera {

// Returns why other users may have access to a file, or "".
std::string WhyNotPrivate(const struct stat& file);

}  // namespace tessera
#endif  // COMM_CONNECT_PRIVATE_FILE_H_
