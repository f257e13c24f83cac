// Names files that were truncated while they were mapped: the kernel ends a
// process that reads on by SIGBUS, without a message.
#ifndef DATA_TRUNCATED_FILES_H_
#define DATA_TRUNCATED_FILES_H_

#include <cstddef>
#include <string>

namespace tessera {

// From here on, until Forget, a SIGBUS in these bytes writes a line with `path`
// to stderr before it does what it did. Covers 1024 mappings of a process at a
// time; further ones are not named. Threads: any.
void NameIfTruncated(const void* begin, size_t bytes, const std::string& path);
void Forget(const void* begin);

}  // namespace tessera
#endif  // DATA_TRUNCATED_FILES_H_
