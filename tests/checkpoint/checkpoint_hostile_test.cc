// Manifests and indices are manipulated, with matching checksums: a field is
// changed, left out or doubled. The engine loads the result, or says why not on
// all ranks and has changed nothing.
#include <torch/torch.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/crc32c.h"
#include "base/file.h"
#include "base/status.h"
#include "checkpoint/format/manifest.h"
#include "comm/world/world.h"
#include "engine/engine.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "tests/checkpoint/checkpoint_state.h"
#include "tests/checkpoint/checkpoint_test_util.h"
#include "tests/support/rank_pool.h"
#include "tests/support/training.h"

namespace tessera {
namespace {

using ::google::protobuf::FieldDescriptor;
using ::google::protobuf::Message;
using ::google::protobuf::Reflection;

constexpr int kRounds = 60;  // of each stage, whose changes are its own

constexpr int64_t kNumbers[] = {0,
                                1,
                                -1,
                                2,
                                63,
                                64,
                                4096,
                                1 << 20,
                                int64_t{1} << 31,
                                int64_t{1} << 48,
                                std::numeric_limits<int64_t>::max(),
                                std::numeric_limits<int64_t>::min()};

// Place is a place in a message: a field and, if it is repeated, its index.
struct Place {
  Message* message;
  const FieldDescriptor* field;
  int index;  // -1: the field is not repeated
};

void AddPlaces(Message* message, std::vector<Place>* places) {
  const Reflection& reflection = *message->GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(*message, &fields);
  for (const FieldDescriptor* field : fields) {
    const bool repeated = field->is_repeated();
    const int size = repeated ? reflection.FieldSize(*message, field) : 1;
    for (int i = 0; i < size; ++i) {
      places->push_back({message, field, repeated ? i : -1});
      if (field->cpp_type() != FieldDescriptor::CPPTYPE_MESSAGE) continue;
      AddPlaces(repeated ? reflection.MutableRepeatedMessage(message, field, i)
                         : reflection.MutableMessage(message, field),
                places);
    }
  }
}

void SetNumber(const Place& at, int64_t number) {
  const Reflection& r = *at.message->GetReflection();
  const bool one = at.index < 0;
  Message* const m = at.message;
  switch (at.field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: {
      const auto value = static_cast<int32_t>(number);
      one ? r.SetInt32(m, at.field, value)
          : r.SetRepeatedInt32(m, at.field, at.index, value);
      break;
    }
    case FieldDescriptor::CPPTYPE_INT64:
      one ? r.SetInt64(m, at.field, number)
          : r.SetRepeatedInt64(m, at.field, at.index, number);
      break;
    case FieldDescriptor::CPPTYPE_BOOL:
      r.SetBool(m, at.field, number % 2 == 0);
      break;
    case FieldDescriptor::CPPTYPE_DOUBLE:
      r.SetDouble(m, at.field, static_cast<double>(number));
      break;
    case FieldDescriptor::CPPTYPE_STRING:
      r.SetString(m, at.field,
                  std::vector<const char*>{"", "../../x", "F32", "BF16",
                                           "value"}[number & 3]);
      break;
    default:  // ids and checksums
      break;
  }
}

void ChangeOnce(Message* message, std::mt19937* random) {
  std::vector<Place> places;
  AddPlaces(message, &places);
  if (places.empty()) return;
  const Place& at = places[(*random)() % places.size()];
  const Reflection& reflection = *at.message->GetReflection();
  switch ((*random)() % 4) {
    case 0:
      if (at.index < 0) {
        reflection.ClearField(at.message, at.field);
      } else {
        reflection.RemoveLast(at.message, at.field);
      }
      break;
    case 1:
      if (at.index >= 0) {
        const int size = reflection.FieldSize(*at.message, at.field);
        reflection.SwapElements(
            at.message, at.field, at.index,
            static_cast<int>((*random)() % static_cast<unsigned>(size)));
      }
      break;
    default:
      SetNumber(at, kNumbers[(*random)() % std::size(kNumbers)]);
  }
}

void WriteTo(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// The checkpoint in `dir`, and what is made of it in the same folder.
class Hostile {
 public:
  static absl::StatusOr<Hostile> Of(const std::string& dir) {
    Hostile hostile;
    hostile.dir_ = dir;
    TESSERA_ASSIGN_OR_RETURN(hostile.manifest_bytes_,
                             ReadWholeFile(dir + "/manifest"));
    TESSERA_ASSIGN_OR_RETURN(hostile.manifest_,
                             DecodeManifest(hostile.manifest_bytes_, dir));
    hostile.data_path_ =
        absl::StrCat(dir, "/", DataFileName(hostile.manifest_.id(), 1));
    TESSERA_ASSIGN_OR_RETURN(hostile.data_, ReadWholeFile(hostile.data_path_));
    return hostile;
  }
  void Change(std::mt19937* random) const {
    proto::CheckpointManifest manifest = manifest_;
    if ((*random)() % 3 == 0) {
      proto::CheckpointFile* const file = manifest.mutable_files(1);
      std::string data = data_.substr(0, file->index_offset());
      proto::CheckpointIndex index;
      index.ParseFromString(data_.substr(data.size()));
      ChangeOnce(&index, random);
      const std::string bytes = index.SerializeAsString();
      file->set_bytes(static_cast<int64_t>(data.size() + bytes.size()));
      file->set_index_bytes(static_cast<int64_t>(bytes.size()));
      file->set_index_crc(Crc32c(bytes));
      WriteTo(data_path_, data + bytes);
    } else {
      for (unsigned i = 0; i <= (*random)() % 3; ++i) {
        ChangeOnce(&manifest, random);
      }
      manifest.set_format_version(kCheckpointFormat);
    }
    WriteTo(dir_ + "/manifest", EncodeManifest(manifest).value());
  }
  void Restore() const {
    WriteTo(dir_ + "/manifest", manifest_bytes_);
    WriteTo(data_path_, data_);
  }

 private:
  std::string dir_, manifest_bytes_, data_path_, data_;
  proto::CheckpointManifest manifest_;
};

// "<loaded> <refused>" of kRounds.
TESSERA_RANK_FUNCTION(LoadHostile) {
  const CheckpointArgs a(args);
  auto model = BuildModel(a.spec.model, world.rank());
  TESSERA_ASSIGN_OR_RETURN(auto engine,
                           MakeEngine(model, a.spec, world.communicator()));
  TESSERA_RETURN_IF_ERROR(engine->LoadCheckpoint(a.dir).status());
  TESSERA_ASSIGN_OR_RETURN(const std::string before, StateOf(*engine, *model));
  const absl::StatusOr<Hostile> hostile = Hostile::Of(a.dir);
  // All ranks must have read before rank 0 changes it.
  TESSERA_RETURN_IF_ERROR(
      world.communicator()->AgreeOk(hostile.status(), "read"));
  std::mt19937 random(static_cast<unsigned>(a.spec.stage));
  int loaded = 0, refused = 0;
  for (int i = 0; i < kRounds; ++i) {
    if (world.rank() == 0) hostile->Change(&random);
    TESSERA_RETURN_IF_ERROR(
        world.communicator()->AgreeOk(absl::OkStatus(), "changed"));
    const absl::Status status = engine->LoadCheckpoint(a.dir).status();
    TESSERA_RETURN_IF_ERROR(world.communicator()->AgreeEqual(
        status.ok() ? "loaded" : "refused", "what became of it"));
    if (world.rank() == 0) hostile->Restore();
    TESSERA_RETURN_IF_ERROR(
        world.communicator()->AgreeOk(absl::OkStatus(), "restored"));
    ++(status.ok() ? loaded : refused);
    absl::Status wrong;
    if (status.ok()) wrong = engine->LoadCheckpoint(a.dir).status();
    TESSERA_ASSIGN_OR_RETURN(const std::string after, StateOf(*engine, *model));
    if (after != before) {
      wrong.Update(absl::InternalError(
          absl::StrCat("it was changed by ", status.ToString())));
    }
    TESSERA_RETURN_IF_ERROR(
        world.communicator()->AgreeOk(wrong, absl::StrCat("round ", i)));
  }
  return absl::StrCat(loaded, " ", refused);
}

TEST_P(CheckpointTest, WhatAnotherHandHasWritten) {
  Run("TrainAndSave", 1);
  for (const std::string& answer : RunOn(2, "LoadHostile", spec_, dir_)) {
    const std::vector<std::string> words = absl::StrSplit(answer, ' ');
    int loaded = 0, refused = 0;
    ASSERT_TRUE(words.size() == 2 && absl::SimpleAtoi(words[0], &loaded) &&
                absl::SimpleAtoi(words[1], &refused))
        << answer;
    EXPECT_GT(loaded, kRounds / 30);
    EXPECT_GT(refused, kRounds / 3);
  }
}

}  // namespace
}  // namespace tessera
