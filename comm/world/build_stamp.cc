#include "comm/world/build_stamp.h"

#include <link.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "torch/csrc/api/include/torch/version.h"

namespace tessera {
namespace {

constexpr size_t kShownBytes = 6;

bool IsIn(const dl_phdr_info& file, uintptr_t address) {
  for (int i = 0; i < file.dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = file.dlpi_phdr[i];
    const uintptr_t begin = file.dlpi_addr + part.p_vaddr;
    if (part.p_type == PT_LOAD && address >= begin &&
        address < begin + part.p_memsz) {
      return true;
    }
  }
  return false;
}

// Names are padded to four bytes, and so are descriptions.
size_t Padded(size_t bytes) { return (bytes + 3) / 4 * 4; }

std::string IdIn(const char* notes, size_t bytes) {
  while (bytes >= sizeof(ElfW(Nhdr))) {
    ElfW(Nhdr) note;
    memcpy(&note, notes, sizeof(note));
    const size_t name_end = sizeof(note) + Padded(note.n_namesz);
    const size_t end = name_end + Padded(note.n_descsz);
    if (end > bytes) return "";
    if (note.n_type == NT_GNU_BUILD_ID && note.n_namesz == 4 &&
        memcmp(notes + sizeof(note), "GNU", 4) == 0) {
      return absl::BytesToHexString(
          absl::string_view(notes + name_end, note.n_descsz)
              .substr(0, kShownBytes));
    }
    notes += end;
    bytes -= end;
  }
  return "";
}

int LookAt(dl_phdr_info* file, size_t, void* found) {
  if (!IsIn(*file, reinterpret_cast<uintptr_t>(&LookAt))) return 0;
  for (int i = 0; i < file->dlpi_phnum; ++i) {
    const ElfW(Phdr)& part = file->dlpi_phdr[i];
    if (part.p_type != PT_NOTE) continue;
    const std::string id =
        IdIn(reinterpret_cast<const char*>(file->dlpi_addr + part.p_vaddr),
             part.p_memsz);
    if (!id.empty()) *static_cast<std::string*>(found) = id;
  }
  return 1;
}

std::string Build(const RankInfo& info) {
  return info.build.empty() ? "a build that is older than this check"
                            : info.build;
}

}  // namespace

std::string BuildStamp() {
  return absl::StrCat("protocol ", kProtocol, ", libtorch ", TORCH_VERSION);
}

std::string BuildId() {
  std::string id;
  dl_iterate_phdr(&LookAt, &id);
  return id;
}

absl::Status CheckBuilds(const std::vector<RankInfo>& infos) {
  for (size_t r = 1; r < infos.size(); ++r) {
    if (infos[r].build == infos[0].build) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("the ranks are of different builds: rank 0 is of ",
                     Build(infos[0]), ", rank ", r, " of ", Build(infos[r]),
                     "; give all hosts the same build of the program"));
  }
  return absl::OkStatus();
}

std::string OtherFiles(const std::vector<RankInfo>& infos) {
  for (size_t r = 1; r < infos.size(); ++r) {
    if (infos[r].build_id == infos[0].build_id) continue;
    return absl::StrCat("rank ", r,
                        " runs another file than rank 0 (build ids ",
                        infos[r].build_id, " and ", infos[0].build_id,
                        "); if it is not meant to, give all hosts the same "
                        "build of the program");
  }
  return "";
}

}  // namespace tessera
