#include "data/tar/tar_shards.h"

#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/bits.h"
#include "base/check.h"
#include "base/status.h"
#include "data/file_names.h"
#include "data/tar/tar_file.h"

namespace tessera {

// Groups the members of archives, one after the other.
class TarShards::Builder {
 public:
  absl::Status AddShard(const std::string& path) {
    TESSERA_ASSIGN_OR_RETURN(MappedFile file, MappedFile::Open(path));
    result_.shards_.push_back(std::move(file));
    seen_keys_.clear();
    last_key_.clear();
    return ForEachTarMember(
        result_.shards_.back().bytes(), path,
        [this](const TarMember& member) { return AddMember(member); });
  }

  TarShards Finish() && {
    result_.samples_.shrink_to_fit();
    result_.members_.shrink_to_fit();
    result_.keys_.shrink_to_fit();
    return std::move(result_);
  }

 private:
  const std::string& path() const { return result_.shards_.back().path(); }

  absl::Status AddMember(const TarMember& member) {
    const absl::string_view name = member.name;
    if (absl::StartsWith(name, "__") && absl::EndsWith(name, "__")) {
      return absl::OkStatus();
    }
    const size_t slash = name.rfind('/');
    const size_t base = slash == absl::string_view::npos ? 0 : slash + 1;
    const size_t dot = name.find('.', base);
    if (dot == absl::string_view::npos || dot == base) return absl::OkStatus();
    const absl::string_view key = name.substr(0, dot);
    if (key != last_key_) TESSERA_RETURN_IF_ERROR(BeginSample(key, member));
    return AddField(absl::AsciiStrToLower(name.substr(dot + 1)), member);
  }

  absl::Status BeginSample(absl::string_view key, const TarMember& member) {
    // Keys are compared by 64 bits: that two of an archive are equal by chance
    // is as unlikely as a disk error.
    const uint64_t print =
        Fingerprint(key.data(), static_cast<int64_t>(key.size()));
    if (!seen_keys_.insert(print).second) {
      return absl::DataLossError(absl::StrCat(
          path(), ": byte ", member.header, ": ", member.name,
          " does not lie beside the other files of its sample; write the "
          "archive with tar --sort=name"));
    }
    last_key_ = std::string(key);
    Sample sample;
    sample.first_member = static_cast<int64_t>(result_.members_.size());
    sample.header = member.header;
    sample.key_begin = static_cast<int64_t>(result_.keys_.size());
    sample.shard = static_cast<int32_t>(result_.shards_.size()) - 1;
    sample.num_members = 0;
    absl::StrAppend(&result_.keys_, key);
    result_.samples_.push_back(sample);
    return absl::OkStatus();
  }

  absl::Status AddField(std::string name, const TarMember& member) {
    Sample& sample = result_.samples_.back();
    const auto [found, added] = name_numbers_.emplace(
        name, static_cast<int32_t>(result_.names_.size()));
    if (added) result_.names_.push_back(std::move(name));
    for (int64_t i = 0; i < sample.num_members; ++i) {
      const auto& other =
          result_.members_[static_cast<size_t>(sample.first_member + i)];
      if (other.name == found->second) {
        return absl::DataLossError(absl::StrCat(
            path(), ": byte ", member.header, ": ", member.name,
            ": the sample ", last_key_, " has two files .", found->first));
      }
    }
    result_.members_.push_back({member.begin, member.size, found->second});
    ++sample.num_members;
    return absl::OkStatus();
  }

  TarShards result_;
  absl::flat_hash_map<std::string, int32_t> name_numbers_;
  absl::flat_hash_set<uint64_t> seen_keys_;  // of the archive
  std::string last_key_;
};

absl::StatusOr<TarShards> TarShards::Open(absl::string_view pattern) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                           MatchFiles(pattern));
  return OpenFiles(paths);
}

absl::StatusOr<TarShards> TarShards::OpenFiles(
    absl::Span<const std::string> paths) {
  Builder builder;
  for (const std::string& path : paths) {
    TESSERA_RETURN_IF_ERROR(builder.AddShard(path));
  }
  TarShards shards = std::move(builder).Finish();
  if (shards.num_samples() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(paths.empty() ? "tar shards" : paths[0], ": no sample in ",
                     paths.size(), " archives; files are named KEY.EXTENSION"));
  }
  return shards;
}

const TarShards::Sample& TarShards::At(int64_t index) const {
  TESSERA_CHECK_GE(index, 0);
  TESSERA_CHECK_LT(index, num_samples());
  return samples_[static_cast<size_t>(index)];
}

absl::string_view TarShards::key(int64_t index) const {
  const int64_t begin = At(index).key_begin;
  const int64_t end = index + 1 < num_samples()
                          ? At(index + 1).key_begin
                          : static_cast<int64_t>(keys_.size());
  return absl::string_view(keys_).substr(static_cast<size_t>(begin),
                                         static_cast<size_t>(end - begin));
}

TarShards::Field TarShards::FieldOf(const Sample& sample, int64_t i) const {
  const Member& member = members_[static_cast<size_t>(sample.first_member + i)];
  return {
      names_[static_cast<size_t>(member.name)],
      shards_[static_cast<size_t>(sample.shard)].bytes().subspan(
          static_cast<size_t>(member.begin), static_cast<size_t>(member.size))};
}

std::vector<TarShards::Field> TarShards::fields(int64_t index) const {
  const Sample& sample = At(index);
  std::vector<Field> fields;
  for (int64_t i = 0; i < sample.num_members; ++i) {
    fields.push_back(FieldOf(sample, i));
  }
  return fields;
}

absl::StatusOr<absl::Span<const uint8_t>> TarShards::field(
    int64_t index, absl::string_view name) const {
  const Sample& sample = At(index);
  for (int64_t i = 0; i < sample.num_members; ++i) {
    const Field field = FieldOf(sample, i);
    if (field.name == name) return field.bytes;
  }
  const auto name_of = [](std::string* out, const Field& field) {
    out->append(field.name.data(), field.name.size());
  };
  return absl::NotFoundError(
      absl::StrCat(Describe(index), " has no field ", name, ", it has ",
                   absl::StrJoin(fields(index), ", ", name_of)));
}

std::string TarShards::Describe(int64_t index) const {
  const Sample& sample = At(index);
  return absl::StrCat(shards_[static_cast<size_t>(sample.shard)].path(),
                      ": byte ", sample.header, ": sample ", key(index));
}

}  // namespace tessera
