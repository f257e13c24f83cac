// Writes files of tests and finds them again by their path.
#ifndef DATA_TEST_FILES_H_
#define DATA_TEST_FILES_H_

#include <sys/stat.h>

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace tessera {

// Returns "TEMP/suite-test-name", so that tests of one program do not collide.
inline std::string TestPath(const std::string& name) {
  const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string path = ::testing::TempDir() + "/" + test->test_suite_name() +
                     "-" + test->name() + "-" + name;
  // Names of parameterized tests have slashes.
  for (size_t i = ::testing::TempDir().size() + 1; i < path.size(); ++i) {
    if (path[i] == '/') path[i] = '-';
  }
  return path;
}

inline std::string TestFolder(const std::string& name) {
  std::string path = TestPath(name);
  mkdir(path.c_str(), 0777);
  return path;
}

inline void WriteBytes(const std::string& path, absl::string_view bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::string WriteTestFile(const std::string& name,
                                 absl::string_view bytes) {
  std::string path = TestPath(name);
  WriteBytes(path, bytes);
  return path;
}

inline std::string ReadBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Returns the bytes of numbers as a little-endian machine stores them.
template <typename T>
std::string BytesOf(const std::vector<T>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()),
          numbers.size() * sizeof(T)};
}

}  // namespace tessera
#endif  // DATA_TEST_FILES_H_
