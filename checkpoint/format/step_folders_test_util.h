// A run's folder on a disk in memory, for tests.
#ifndef CHECKPOINT_FORMAT_STEP_FOLDERS_TEST_UTIL_H_
#define CHECKPOINT_FORMAT_STEP_FOLDERS_TEST_UTIL_H_

#include <fcntl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/status_matchers.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/sample_checkpoint_test_util.h"
#include "checkpoint/format/step_folders.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {

inline constexpr char kDir[] = "/run";

class StepFoldersTest : public testing::Test {
 protected:
  std::string PathOf(int64_t step) {
    return absl::StrCat(kDir, "/", StepFolderName(step));
  }
  // Saves at a time of its own, later than those before.
  void Save(int64_t step, int64_t at) {
    SampleCheckpoint sample(static_cast<int>(step));
    sample.set_saved_unix_micros(at);
    bool committed = false;
    TESSERA_EXPECT_OK(sample.Save(PathOf(step), &disk_, 2, &committed));
  }
  std::vector<int64_t> Found() {
    std::vector<int64_t> steps;
    const auto found = ListStepFolders(kDir, &disk_).value();
    for (const StepFolder& one : found) {
      const absl::Status state = CheckFilesOf(PathOf(one.step), &disk_);
      steps.push_back(absl::IsDataLoss(state) ? -one.step : one.step);
    }
    return steps;
  }
  void Put(const std::string& path, const std::string& bytes) {
    const int fd = disk_.Open(AT_FDCWD, path, O_CREAT | O_WRONLY);
    ASSERT_GE(fd, 0);
    disk_.Write(fd, bytes.data(), static_cast<int64_t>(bytes.size()), 0);
    disk_.Close(fd);
  }
  std::vector<std::string> NamesIn(const std::string& path) {
    std::vector<std::string> names;
    for (const auto& [name, bytes] : disk_.FilesIn(path)) names.push_back(name);
    return names;
  }
  // Removes a data file of the checkpoint of `step`.
  void Damage(int64_t step) {
    const Folder folder = Folder::Open(PathOf(step), &disk_).value();
    const auto manifest = ReadManifest(folder).value();
    TESSERA_EXPECT_OK(folder.Remove(DataFileName(manifest.id(), 1)));
  }

  MemoryDisk disk_;
};

}  // namespace tessera
#endif  // CHECKPOINT_FORMAT_STEP_FOLDERS_TEST_UTIL_H_
