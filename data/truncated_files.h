// Names files that were truncated while they were mapped: the kernel ends who
// reads on by SIGBUS, without a word.
#ifndef DATA_TRUNCATED_FILES_H_
#define DATA_TRUNCATED_FILES_H_

#include <cstddef>
#include <string>

namespace tessera {

// From here on, until Forget, a SIGBUS in these bytes writes a line with `path`
// to stderr before it does what it did. The first 1024 mappings of a process at
// a time; more go unnamed. Threads: any.
void NameIfTruncated(const void* begin, size_t bytes, const std::string& path);
void Forget(const void* begin);

}  // namespace tessera
#endif  // DATA_TRUNCATED_FILES_H_
