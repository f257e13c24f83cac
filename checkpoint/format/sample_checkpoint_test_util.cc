#include "checkpoint/format/sample_checkpoint_test_util.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/data_file.h"

namespace tessera {

std::pair<int64_t, int64_t> SliceOf(int64_t numel, int part, int parts) {
  const int64_t blocks = (numel + 63) / 64;
  return {std::min(numel, blocks * part / parts * 64),
          std::min(numel, blocks * (part + 1) / parts * 64)};
}

SampleCheckpoint::SampleCheckpoint(int seed, bool large) {
  std::mt19937 random(static_cast<unsigned>(seed));
  head_.set_format_version(kCheckpointFormat);
  head_.set_step(seed);
  const std::vector<int64_t> sizes =
      large ? std::vector<int64_t>{1, 64, 1000, 70000, 17, 128, 0, 300001}
            : std::vector<int64_t>{1, 65, 130};
  for (size_t s = 0; s < sizes.size(); ++s) {
    proto::CheckpointStorage* const storage = head_.add_storages();
    storage->set_numel(sizes[s]);
    proto::CheckpointTensor* const tensor = storage->add_tensors();
    tensor->set_name(absl::StrCat("layer", s, ".weight"));
    tensor->set_offset(0);
    tensor->add_sizes(sizes[s]);
    tensor->add_strides(1);
    bytes_.emplace_back();
    const int num_states = s % 2 == 0 ? 3 : 1;
    for (int i = 0; i < num_states; ++i) {
      proto::CheckpointState* const state = storage->add_states();
      state->set_name(i == 0 ? "value" : i == 1 ? "exp_avg" : "exp_avg_sq");
      state->set_dtype(s % 3 == 1 ? "BF16" : "F32");
      std::string bytes(
          static_cast<size_t>(sizes[s] * DtypeBytes(state->dtype())), '\0');
      for (char& byte : bytes) byte = static_cast<char>(random());
      bytes_.back().push_back(std::move(bytes));
    }
  }
}

absl::Status SampleCheckpoint::Save(const std::string& path, FileSystem* files,
                                    int num_ranks, bool* committed) const {
  *committed = false;
  TESSERA_ASSIGN_OR_RETURN(Saving saving, Saving::Begin(path, files));
  const auto run = [&]() -> absl::Status {
    proto::CheckpointManifest manifest = head_;
    manifest.set_id(saving.id());
    for (int r = 0; r < num_ranks; ++r) {
      TESSERA_ASSIGN_OR_RETURN(
          DataFileWriter writer,
          DataFileWriter::Create(saving.folder(), saving.id(), r));
      for (int s = 0; s < head_.storages_size(); ++s) {
        const proto::CheckpointStorage& storage = head_.storages(s);
        const auto [begin, end] = SliceOf(storage.numel(), r, num_ranks);
        for (int i = 0; i < storage.states_size() && begin < end; ++i) {
          const int64_t size = DtypeBytes(storage.states(i).dtype());
          TESSERA_RETURN_IF_ERROR(
              writer.Add(s, i, begin, end - begin,
                         absl::string_view(bytes_[s][i])
                             .substr(begin * size, (end - begin) * size)));
        }
      }
      writer.AddValue("rank", absl::StrCat(r));
      TESSERA_ASSIGN_OR_RETURN(*manifest.add_files(), writer.Finish());
    }
    return saving.Commit(manifest, committed);
  };
  const absl::Status status = run();
  if (!status.ok() && !*committed) saving.Abandon();
  return status;
}

absl::Status SampleCheckpoint::Compare(const std::string& path,
                                       FileSystem* files, int num_ranks) const {
  for (int r = 0; r < num_ranks; ++r) {
    TESSERA_ASSIGN_OR_RETURN(CheckpointReader reader,
                             CheckpointReader::Open(path, files));
    if (reader.manifest().step() != head_.step()) {
      return absl::NotFoundError(
          absl::StrCat("it is that of step ", reader.manifest().step()));
    }
    std::vector<std::vector<std::string>> got(bytes_.size());
    std::vector<WantedElements> wanted;
    for (int s = 0; s < head_.storages_size(); ++s) {
      const proto::CheckpointStorage& storage = head_.storages(s);
      const auto [begin, end] = SliceOf(storage.numel(), r, num_ranks);
      got[s].resize(static_cast<size_t>(storage.states_size()));
      for (int i = 0; i < storage.states_size() && begin < end; ++i) {
        const int64_t size = DtypeBytes(storage.states(i).dtype());
        got[s][i].resize(static_cast<size_t>((end - begin) * size));
        wanted.push_back({s, i, begin, end, got[s][i].data()});
      }
    }
    TESSERA_RETURN_IF_ERROR(reader.Read(wanted, /*num_threads=*/2));
    for (const WantedElements& w : wanted) {
      const int64_t size =
          DtypeBytes(head_.storages(w.storage).states(w.state).dtype());
      if (got[w.storage][w.state] !=
          bytes_[w.storage][w.state].substr(w.begin * size,
                                            (w.end - w.begin) * size)) {
        return absl::InternalError(absl::StrCat(
            "storage ", w.storage, " state ", w.state, " has other bytes"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
