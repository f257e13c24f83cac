#include "checkpoint/exchange/command.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <map>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/status.h"
#include "checkpoint/exchange/rewrite.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/format/checkpoint_reader.h"

namespace tessera {
namespace {

constexpr char kUsage[] =
    "tessera checkpoint COMMAND ...\n"
    "\n"
    "  ls DIR        the checkpoints in DIR and in its folders\n"
    "  show DIR      its tensors, states, files, and the run that saved it\n"
    "  verify DIR    reads all of it: every checksum, every element once\n"
    "  diff A B      which tensors differ, and by how much at most\n"
    "  rm DIR        removes it, and no other file\n"
    "  export DIR OUT [--dtype=fp32|bf16] [--names=gpt2|FILE]\n"
    "                [--max_file_bytes=N]\n"
    "                its values as safetensors files, as Hugging Face's\n"
    "                libraries read them; FILE: "
    "checkpoint/exchange/name_map.h\n"
    "  import FILES OUT [--names=gpt2|FILE]\n"
    "                the other way: values alone, for\n"
    "                LoadCheckpointOptions::model_only\n"
    "  reshard DIR OUT --files=N\n"
    "                the same in N files (no need to: any number of ranks\n"
    "                loads any number of files)\n";
constexpr int kThreads = 4;
constexpr int64_t kDiffElements = int64_t{4} << 20;  // held of each at a time

using Args = std::vector<std::string>;

std::string SizeText(int64_t bytes) {
  if (bytes < int64_t{1} << 20) return absl::StrCat(bytes, " bytes");
  return absl::StrFormat("%.1f MiB", static_cast<double>(bytes) / (1 << 20));
}

int64_t BytesOf(const proto::CheckpointManifest& manifest) {
  int64_t bytes = 0;
  for (const auto& file : manifest.files()) bytes += file.bytes();
  return bytes;
}

std::string Summary(const proto::CheckpointManifest& manifest) {
  int64_t parameters = 0;
  for (const auto& storage : manifest.storages()) {
    if (!storage.buffer()) parameters += storage.numel();
  }
  const auto& training = manifest.training();
  return absl::StrCat(
      "step ", manifest.step(), ", ", parameters, " numbers of parameters, ",
      SizeText(BytesOf(manifest)), " in ", manifest.files_size(),
      manifest.files_size() == 1 ? " file" : " files",
      manifest.has_training()
          ? absl::StrCat(", saved at stage ", training.stage(), " by ",
                         training.world_size(),
                         training.world_size() == 1 ? " rank" : " ranks")
          : "",
      manifest.has_saved_unix_micros()
          ? absl::FormatTime(", %Y-%m-%d %H:%M:%S UTC",
                             absl::FromUnixMicros(manifest.saved_unix_micros()),
                             absl::UTCTimeZone())
          : "");
}

std::string Sizes(const proto::CheckpointTensor& tensor) {
  return absl::StrCat("[", absl::StrJoin(tensor.sizes(), ", "), "]");
}

absl::StatusOr<CheckpointReader> Open(const std::string& dir) {
  return CheckpointReader::Open(dir, FileSystem::Real());
}

absl::Status List(const std::string& dir, std::ostream* out) {
  std::vector<std::string> folders = {dir};
  std::error_code error;
  std::filesystem::directory_iterator entries(dir, error);
  while (!error && entries != std::filesystem::directory_iterator()) {
    if (entries->is_directory(error)) folders.push_back(entries->path());
    entries.increment(error);
  }
  std::sort(folders.begin() + 1, folders.end());
  int found = 0;
  for (const std::string& folder : folders) {
    const absl::StatusOr<CheckpointReader> reader = Open(folder);
    if (absl::IsNotFound(reader.status())) continue;
    ++found;
    *out << folder << ": "
         << (reader.ok() ? Summary(reader->manifest())
                         : std::string(reader.status().message()))
         << "\n";
  }
  return found > 0 ? absl::OkStatus()
                   : absl::NotFoundError(
                         absl::StrCat(dir, ": there is no checkpoint in it"));
}

absl::Status Show(const std::string& dir, std::ostream* out) {
  TESSERA_ASSIGN_OR_RETURN(const CheckpointReader reader, Open(dir));
  const proto::CheckpointManifest& manifest = reader.manifest();
  *out << Summary(manifest) << "\n";
  for (const auto& storage : manifest.storages()) {
    std::vector<std::string> states;
    for (const auto& state : storage.states()) {
      states.push_back(absl::StrCat(state.name(), " ", state.dtype()));
    }
    for (int t = 0; t < storage.tensors_size(); ++t) {
      const auto& tensor = storage.tensors(t);
      *out << "  " << tensor.name() << " " << Sizes(tensor)
           << (storage.buffer() ? " buffer" : "");
      if (t > 0) {
        *out << " shares memory with " << storage.tensors(0).name() << "\n";
        continue;
      }
      *out << ": " << absl::StrJoin(states, ", ");
      if (tensor.has_steps()) *out << "; " << tensor.steps() << " steps";
      *out << "\n";
    }
  }
  const auto& training = manifest.training();
  if (training.has_optimizer()) {
    *out << "optimizer " << training.optimizer();
    if (training.has_learning_rate()) {
      *out << ", learning rate " << training.learning_rate();
    }
    *out << "\n";
  }
  if (training.has_loss_scale()) {
    *out << "loss scale " << training.loss_scale() << ", "
         << training.skipped_steps() << " steps skipped\n";
  }
  if (training.has_config()) *out << training.config() << "\n";
  return absl::OkStatus();
}

absl::Status Verify(const std::string& dir, std::ostream* out) {
  TESSERA_ASSIGN_OR_RETURN(CheckpointReader reader, Open(dir));
  TESSERA_RETURN_IF_ERROR(reader.Verify(kThreads));
  *out << dir << ": whole; " << Summary(reader.manifest()) << "\n";
  return absl::OkStatus();
}

// ---- diff ----

struct Named {
  int storage = 0;
  int state = 0;
};

// "layer.weight value" -> where it is; a storage by its first tensor.
std::map<std::string, Named> StatesOf(
    const proto::CheckpointManifest& manifest) {
  std::map<std::string, Named> states;
  for (int s = 0; s < manifest.storages_size(); ++s) {
    const auto& storage = manifest.storages(s);
    for (int i = 0; i < storage.states_size(); ++i) {
      states[absl::StrCat(storage.tensors(0).name(), " ",
                          storage.states(i).name())] = {s, i};
    }
  }
  return states;
}

double NumberAt(const std::string& bytes, const std::string& dtype,
                int64_t index) {
  const char* const at = bytes.data() + index * DtypeBytes(dtype);
  const auto as = [&](auto number) {
    std::memcpy(&number, at, sizeof(number));
    return static_cast<double>(number);
  };
  if (dtype == "F32") return as(float{});
  if (dtype == "F64") return as(double{});
  if (dtype == "I64") return as(int64_t{});
  if (dtype == "I32") return as(int32_t{});
  if (dtype == "BF16") {
    uint16_t half = 0;
    std::memcpy(&half, at, sizeof(half));
    const uint32_t whole = uint32_t{half} << 16;
    float number = 0;
    std::memcpy(&number, &whole, sizeof(number));
    return number;
  }
  return std::nan("");  // its size is not shown
}

// "": equal to the bit.
absl::StatusOr<std::string> Difference(CheckpointReader* a, Named in_a,
                                       CheckpointReader* b, Named in_b) {
  const auto& first = a->manifest().storages(in_a.storage);
  const auto& second = b->manifest().storages(in_b.storage);
  const std::string dtype = first.states(in_a.state).dtype();
  const std::string other = second.states(in_b.state).dtype();
  if (first.numel() != second.numel() || dtype != other ||
      Sizes(first.tensors(0)) != Sizes(second.tensors(0))) {
    return absl::StrCat(Sizes(first.tensors(0)), " ", dtype, " there, ",
                        Sizes(second.tensors(0)), " ", other, " here");
  }
  int64_t differing = 0;
  double most = 0;
  const int64_t size = DtypeBytes(dtype);
  for (int64_t begin = 0; begin < first.numel(); begin += kDiffElements) {
    const int64_t end = std::min(begin + kDiffElements, first.numel());
    std::string x(static_cast<size_t>((end - begin) * size), '\0'), y = x;
    TESSERA_RETURN_IF_ERROR(
        a->Read({{in_a.storage, in_a.state, begin, end, x.data()}}, kThreads));
    TESSERA_RETURN_IF_ERROR(
        b->Read({{in_b.storage, in_b.state, begin, end, y.data()}}, kThreads));
    if (x == y) continue;
    for (int64_t i = 0; i < end - begin; ++i) {
      if (x.compare(i * size, size, y, i * size, size) == 0) continue;
      ++differing;
      const double by = std::abs(NumberAt(x, dtype, i) - NumberAt(y, dtype, i));
      if (by > most || std::isnan(by)) most = by;
    }
  }
  if (differing == 0) return "";
  if (std::isnan(most)) {  // of NaNs, or a dtype that is not taken apart here
    return absl::StrCat(differing, " of ", first.numel(), " numbers differ");
  }
  return absl::StrFormat("%d of %d numbers differ, by %g at most", differing,
                         first.numel(), most);
}

// How many states differ.
absl::StatusOr<int> Diff(const std::string& dir_a, const std::string& dir_b,
                         std::ostream* out) {
  TESSERA_ASSIGN_OR_RETURN(CheckpointReader a, Open(dir_a));
  TESSERA_ASSIGN_OR_RETURN(CheckpointReader b, Open(dir_b));
  const std::map<std::string, Named> in_a = StatesOf(a.manifest());
  const std::map<std::string, Named> in_b = StatesOf(b.manifest());
  int differ = 0, equal = 0;
  for (const auto& [name, place] : in_a) {
    const auto other = in_b.find(name);
    std::string what = absl::StrCat("only in ", dir_a);
    if (other != in_b.end()) {
      TESSERA_ASSIGN_OR_RETURN(what, Difference(&a, place, &b, other->second));
    }
    ++(what.empty() ? equal : differ);
    if (!what.empty()) *out << name << ": " << what << "\n";
  }
  for (const auto& [name, place] : in_b) {
    if (in_a.count(name) > 0) continue;
    ++differ;
    *out << name << ": only in " << dir_b << "\n";
  }
  *out << equal << " states are equal to the bit, " << differ << " differ\n";
  return differ;
}

// ---- export, import, reshard ----

// "12.0 MiB of 96.0 MiB" in one line, now and then.
class ProgressLine {
 public:
  explicit ProgressLine(std::ostream* err) : err_(*err) {}
  ~ProgressLine() {
    if (shown_) err_ << "\n";
  }
  void Show(int64_t done, int64_t of) {
    const absl::Time now = absl::Now();
    if (now - last_ < absl::Seconds(1)) return;
    last_ = now;
    shown_ = true;
    err_ << "\r" << SizeText(done) << " of " << SizeText(of) << std::flush;
  }

 private:
  std::ostream& err_;
  absl::Time last_ = absl::Now();
  bool shown_ = false;
};

// "--name=value" of args[3] on.
absl::StatusOr<std::map<std::string, std::string>> FlagsOf(
    const Args& args, const std::vector<std::string>& known) {
  std::map<std::string, std::string> flags;
  for (size_t i = 3; i < args.size(); ++i) {
    const std::pair<std::string, std::string> flag =
        absl::StrSplit(args[i], absl::MaxSplits('=', 1));
    if (std::find(known.begin(), known.end(), flag.first) == known.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", args[i], "': expected ",
                       absl::StrJoin(known, "=..., "), "=..."));
    }
    flags[flag.first] = flag.second;
  }
  return flags;
}

absl::Status Export(const Args& args, std::ostream* err) {
  TESSERA_ASSIGN_OR_RETURN(
      const auto flags,
      FlagsOf(args, {"--dtype", "--names", "--max_file_bytes"}));
  SafetensorsExportOptions options;
  for (const auto& [name, value] : flags) {
    if (name == "--names") {
      TESSERA_ASSIGN_OR_RETURN(options.names, NameMap::Load(value));
    } else if (name == "--max_file_bytes") {
      if (!absl::SimpleAtoi(value, &options.max_file_bytes)) {
        return absl::InvalidArgumentError(
            absl::StrCat(name, ": expected a number, got '", value, "'"));
      }
    } else {
      if (value != "fp32" && value != "bf16") {
        return absl::InvalidArgumentError(
            absl::StrCat(name, ": expected fp32 or bf16, got '", value, "'"));
      }
      options.dtype = value == "fp32" ? "F32" : "BF16";
    }
  }
  ProgressLine line(err);
  return ExportSafetensors(
      args[1], args[2], options,
      [&](int64_t done, int64_t of) { line.Show(done, of); },
      FileSystem::Real());
}

absl::Status Import(const Args& args, std::ostream* err) {
  TESSERA_ASSIGN_OR_RETURN(const auto flags, FlagsOf(args, {"--names"}));
  NameMap names;
  for (const auto& flag : flags) {
    TESSERA_ASSIGN_OR_RETURN(names, NameMap::Load(flag.second));
  }
  ProgressLine line(err);
  return ImportSafetensors(
      args[1], args[2], names,
      [&](int64_t done, int64_t of) { line.Show(done, of); },
      FileSystem::Real());
}

absl::Status ReshardTo(const Args& args, std::ostream* err) {
  TESSERA_ASSIGN_OR_RETURN(auto flags, FlagsOf(args, {"--files"}));
  int files = 0;
  if (!absl::SimpleAtoi(flags["--files"], &files)) {
    return absl::InvalidArgumentError("reshard: expected --files=N");
  }
  ProgressLine line(err);
  return ReshardCheckpoint(
      args[1], args[2], files,
      [&](int64_t done, int64_t of) { line.Show(done, of); },
      FileSystem::Real());
}

absl::Status Run(const Args& args, std::ostream* out, std::ostream* err,
                 bool* differ) {
  const std::string& command = args[0];
  if (command == "ls") return List(args[1], out);
  if (command == "show") return Show(args[1], out);
  if (command == "verify") return Verify(args[1], out);
  if (command == "rm") return RemoveCheckpoint(args[1], FileSystem::Real());
  if (command == "export") return Export(args, err);
  if (command == "import") return Import(args, err);
  if (command == "reshard") return ReshardTo(args, err);
  TESSERA_ASSIGN_OR_RETURN(const int differing, Diff(args[1], args[2], out));
  *differ = differing > 0;
  return absl::OkStatus();
}

bool IsCommand(const Args& args) {
  if (args.empty()) return false;
  for (const char* one : {"ls", "show", "verify", "rm"}) {
    if (args[0] == one) return args.size() == 2;
  }
  for (const char* one : {"export", "import", "reshard"}) {
    if (args[0] == one) return args.size() >= 3;
  }
  return args[0] == "diff" && args.size() == 3;
}

}  // namespace

int RunCheckpointCommand(const Args& args, std::ostream* out,
                         std::ostream* err) {
  if (!IsCommand(args)) {
    *err << kUsage;
    return 2;
  }
  bool differ = false;
  const absl::Status status = Run(args, out, err, &differ);
  if (!status.ok()) *err << status.ToString() << "\n";
  return status.ok() && !differ ? 0 : 1;
}

}  // namespace tessera
