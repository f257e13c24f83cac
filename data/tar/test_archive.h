// Makes tar archives for tests, byte by byte, without the code that is tested.
#ifndef DATA_TAR_TEST_ARCHIVE_H_
#define DATA_TAR_TEST_ARCHIVE_H_

#include <cstdint>
#include <cstdio>
#include <string>

namespace tessera {

// Returns a header of 512 bytes with a correct sum. `magic` is POSIX's "ustar"
// and a zero, or GNU's "ustar  ".
inline std::string TarHeader(const std::string& name, int64_t size,
                             char kind = '0',
                             const std::string& magic = std::string("ustar\0",
                                                                    6),
                             const std::string& prefix = "") {
  std::string header(512, '\0');
  const auto put = [&header](size_t at, const std::string& text) {
    header.replace(at, text.size(), text);
  };
  char octal[16];
  std::snprintf(octal, sizeof(octal), "%011lo", static_cast<long>(size));
  put(0, name);
  put(100, "0000644");
  put(124, octal);
  header[156] = kind;
  put(257, magic);
  put(345, prefix);
  put(148, "        ");
  unsigned sum = 0;
  for (const char c : header) sum += static_cast<uint8_t>(c);
  std::snprintf(octal, sizeof(octal), "%06o", sum);
  put(148, std::string(octal, 7) + " ");
  return header;
}

inline std::string TarContent(const std::string& content) {
  return content + std::string((512 - content.size() % 512) % 512, '\0');
}

inline std::string TarMemberBytes(const std::string& name,
                                  const std::string& content, char kind = '0') {
  return TarHeader(name, static_cast<int64_t>(content.size()), kind) +
         TarContent(content);
}

inline std::string TarEnd() { return std::string(1024, '\0'); }

// Returns a record of a pax header; LENGTH counts its own digits.
inline std::string PaxRecord(const std::string& key, const std::string& value) {
  const std::string rest = " " + key + "=" + value + "\n";
  size_t length = rest.size() + 1;
  while (std::to_string(length).size() + rest.size() != length) ++length;
  return std::to_string(length) + rest;
}

}  // namespace tessera
#endif  // DATA_TAR_TEST_ARCHIVE_H_
