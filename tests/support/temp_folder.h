// TempFolder is a folder of a test, removed with the object.
#ifndef TESTS_SUPPORT_TEMP_FOLDER_H_
#define TESTS_SUPPORT_TEMP_FOLDER_H_

#include <cstdlib>
#include <filesystem>
#include <string>

#include "gtest/gtest.h"

namespace tessera {

class TempFolder {
 public:
  TempFolder() : path_(::testing::TempDir() + "/test_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) abort();
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const {
    return path_ + "/" + name;
  }

 private:
  std::string path_;
};

}  // namespace tessera
#endif  // TESTS_SUPPORT_TEMP_FOLDER_H_
