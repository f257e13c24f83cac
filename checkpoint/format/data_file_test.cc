#include "checkpoint/format/data_file.h"

#include <string>

#include "base/status_matchers.h"
#include "checkpoint/disk/folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "testing/disk/memory_disk.h"

namespace tessera {
namespace {

constexpr int64_t kMiB = 1 << 20;

TEST(DataFileWriterTest, TheDiskBeginsBeforeTheEnd) {
  MemoryDisk disk;
  absl::StatusOr<Folder> folder = Folder::Make("/run/ckpt", &disk);
  TESSERA_ASSERT_OK(folder.status());
  absl::StatusOr<DataFileWriter> writer =
      DataFileWriter::Create(*folder, /*id=*/7, /*rank=*/0);
  TESSERA_ASSERT_OK(writer.status());
  const std::string bytes(40 * kMiB, 'x');
  TESSERA_ASSERT_OK(
      writer->Add(0, 0, 0, static_cast<int64_t>(bytes.size()), bytes));
  EXPECT_GE(disk.started_bytes(), 24 * kMiB);
  const absl::StatusOr<proto::CheckpointFile> file = writer->Finish();
  TESSERA_ASSERT_OK(file.status());
  EXPECT_LE(disk.started_bytes(), file->bytes());  // none twice
}

}  // namespace
}  // namespace tessera
