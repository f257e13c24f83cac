#include "checkpoint/exchange/diff.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "checkpoint/exchange/batches.h"
#include "checkpoint/exchange/terminal.h"
#include "checkpoint/format/checkpoint_reader.h"
#include "checkpoint/format/manifest.h"

namespace tessera {
namespace {

// Facts are pairs of label and text, in the same order for every tensor.
using Facts = std::vector<std::pair<std::string, std::string>>;

Facts FactsOf(const proto::CheckpointStorage& storage,
              const proto::CheckpointTensor& tensor) {
  const auto list = [](const auto& numbers) {
    return absl::StrCat("[", absl::StrJoin(numbers, ", "), "]");
  };
  return {
      {"sizes", list(tensor.sizes())},
      {"strides", list(tensor.strides())},
      {"offset", absl::StrCat(tensor.offset())},
      {"numbers", tensor.complex() ? "complex" : "real"},
      {"kind", storage.buffer() ? "buffer" : "parameter"},
      {"steps", tensor.has_steps() ? absl::StrCat(tensor.steps()) : "none"},
      {"memory of", storage.tensors(0).name()},
  };
}

// Returns what is known of each tensor, by its name.
std::map<std::string, Facts> TensorsOf(
    const proto::CheckpointManifest& manifest) {
  std::map<std::string, Facts> tensors;
  for (const auto& storage : manifest.storages()) {
    for (const auto& tensor : storage.tensors()) {
      tensors[tensor.name()] = FactsOf(storage, tensor);
    }
  }
  return tensors;
}

// Returns where each state is, by "layer.weight value"; a storage has its first
// tensor's name.
std::map<std::string, WantedElements> StatesOf(
    const proto::CheckpointManifest& manifest) {
  std::map<std::string, WantedElements> states;
  for (int s = 0; s < manifest.storages_size(); ++s) {
    const auto& storage = manifest.storages(s);
    for (int i = 0; i < storage.states_size(); ++i) {
      states[absl::StrCat(storage.tensors(0).name(), " ",
                          storage.states(i).name())] = {s, i, 0,
                                                        storage.numel()};
    }
  }
  return states;
}

std::string DtypeOf(const CheckpointReader& reader, const WantedElements& of) {
  return reader.manifest().storages(of.storage).states(of.state).dtype();
}

template <class T>
double RealAt(const char* at) {
  T number;
  std::memcpy(&number, at, sizeof(number));
  return static_cast<double>(number);
}

// Returns a function that reads a number of that dtype; it returns NaN for
// dtypes whose differences have no size in the report.
double (*NumberOf(const std::string& dtype))(const char*) {
  if (dtype == "F32") return RealAt<float>;
  if (dtype == "F64") return RealAt<double>;
  if (dtype == "I64") return RealAt<int64_t>;
  if (dtype == "I32") return RealAt<int32_t>;
  if (dtype == "BF16") {
    return [](const char* at) {
      char wide[4] = {0, 0, at[0], at[1]};
      return RealAt<float>(wide);
    };
  }
  return [](const char*) { return std::nan(""); };
}

// What was found so far of a state that both have.
struct Found {
  std::string name;
  int64_t numel = 0, differing = 0;
  double most = 0;

  void Compare(absl::string_view a, absl::string_view b,
               const std::string& dtype) {
    if (a == b) return;
    const auto size = static_cast<size_t>(DtypeBytes(dtype));
    const auto number = NumberOf(dtype);
    for (size_t at = 0; at < a.size(); at += size) {
      if (a.substr(at, size) == b.substr(at, size)) continue;
      ++differing;
      const double by = std::abs(number(&a[at]) - number(&b[at]));
      if (by > most || std::isnan(by)) most = by;
    }
  }
  std::string Text() const {
    return std::isnan(most)
               ? absl::StrCat(differing, " of ", numel, " numbers differ")
               : absl::StrFormat("%d of %d numbers differ, by %g at most",
                                 differing, numel, most);
  }
};

class Difference {
 public:
  Difference(CheckpointReader* a, CheckpointReader* b,
             const DiffOptions& options, std::ostream* out)
      : a_(*a), b_(*b), options_(options), out_(*out) {}

  absl::StatusOr<int> Run() {
    CompareRuns();
    CompareTensors();
    TESSERA_RETURN_IF_ERROR(CompareOwn());
    const int others = differ_;
    int equal = 0;
    TESSERA_RETURN_IF_ERROR(CompareStates(&equal));
    out_ << equal << " states are equal to the bit, " << differ_ - others
         << " differ";
    if (others > 0) out_ << "; " << others << " other differences";
    out_ << "\n";
    WriteLines();
    return differ_;
  }

 private:
  void Say(absl::string_view what, absl::string_view how) {
    ++differ_;
    if (++times_[std::string(how)] == 1 || !options_.together) {
      lines_.push_back({std::string(what), std::string(how)});
    }
  }
  void WriteLines() {
    const size_t most = std::min(lines_.size(), options_.most_lines);
    for (size_t i = 0; i < most; ++i) {
      const auto& [what, how] = lines_[i];
      const int others = options_.together ? times_[how] - 1 : 0;
      out_ << Printable(what);
      if (others > 0) out_ << " and " << others << " more";
      out_ << ": " << Printable(how) << "\n";
    }
    if (most < lines_.size()) {
      out_ << "... and " << lines_.size() - most << " lines more\n";
    }
  }
  // Calls `both` with what is in both maps.
  template <class Map, class Both>
  void Match(const Map& a, const Map& b, absl::string_view of,
             const Both& both) {
    for (const auto& [name, in_a] : a) {
      const auto other = b.find(name);
      if (other != b.end()) {
        both(name, in_a, other->second);
      } else {
        Say(absl::StrCat(of, name), absl::StrCat("only in ", a_.path()));
      }
    }
    for (const auto& [name, in_b] : b) {
      if (a.count(name) > 0) continue;
      Say(absl::StrCat(of, name), absl::StrCat("only in ", b_.path()));
    }
  }

  void CompareRuns() {
    const auto of = [](const CheckpointReader& reader) {
      proto::CheckpointTraining run = reader.manifest().training();
      run.clear_world_size();
      run.clear_stage();
      run.clear_config();
      run.clear_libtorch();
      return absl::StrCat("step ", reader.manifest().step(), " ",
                          run.ShortDebugString());
    };
    if (of(a_) != of(b_)) {
      Say("training", absl::StrCat(of(a_), " there, ", of(b_), " here"));
    }
  }

  void CompareTensors() {
    Match(TensorsOf(a_.manifest()), TensorsOf(b_.manifest()), "",
          [&](const std::string& name, const Facts& a, const Facts& b) {
            std::vector<std::string> differ;
            for (size_t i = 0; i < a.size(); ++i) {
              if (a[i].second == b[i].second) continue;
              differ.push_back(absl::StrCat(a[i].first, " ", a[i].second,
                                            " there, ", b[i].second, " here"));
            }
            if (!differ.empty()) Say(name, absl::StrJoin(differ, "; "));
          });
  }

  // Compares the own values of ranks that both have.
  absl::Status CompareOwn() {
    const int files_a = a_.manifest().files_size();
    const int files_b = b_.manifest().files_size();
    for (int r = 0; r < std::max(files_a, files_b); ++r) {
      decltype(a_.ValuesOf(r)) in_a = decltype(a_.ValuesOf(r))::value_type();
      auto in_b = in_a;
      if (r < files_a) in_a = a_.ValuesOf(r);
      if (r < files_b) in_b = b_.ValuesOf(r);
      TESSERA_RETURN_IF_ERROR(in_a.status());
      TESSERA_RETURN_IF_ERROR(in_b.status());
      std::map<std::string, std::string> a, b;
      for (const auto& value : *in_a) a[value.name()] = value.value();
      for (const auto& value : *in_b) b[value.name()] = value.value();
      const std::string of = absl::StrCat("rank ", r, "'s ");
      Match(a, b, of,
            [&](const std::string& name, const std::string& x,
                const std::string& y) {
              if (x == y) return;
              Say(absl::StrCat(of, name),
                  absl::StrCat(x.size(), " bytes there, ", y.size(),
                               " other bytes here"));
            });
    }
    return absl::OkStatus();
  }

  absl::Status CompareStates(int* equal) {
    std::vector<WantedElements> ranges_a, ranges_b;
    std::vector<Found> found;
    int64_t total = 0, done = 0;
    Match(StatesOf(a_.manifest()), StatesOf(b_.manifest()), "",
          [&](const std::string& name, const WantedElements& a,
              const WantedElements& b) {
            const std::string of_a = DtypeOf(a_, a), of_b = DtypeOf(b_, b);
            if (a.end != b.end || of_a != of_b) {
              Say(name, absl::StrCat(a.end, " ", of_a, " there, ", b.end, " ",
                                     of_b, " here"));
              return;
            }
            ranges_a.push_back(a);
            ranges_b.push_back(b);
            found.push_back({name, a.end});
            total += a.end * DtypeBytes(of_a);
          });
    TESSERA_RETURN_IF_ERROR(ReadInBatches(
        {{&a_, ranges_a}, {&b_, ranges_b}},
        [&](size_t range, int64_t, absl::Span<const absl::string_view> bytes) {
          found[range].Compare(bytes[0], bytes[1],
                               DtypeOf(a_, ranges_a[range]));
          done += static_cast<int64_t>(bytes[0].size());
          if (options_.progress) options_.progress(done, total);
          return absl::OkStatus();
        }));
    for (const Found& one : found) {
      if (one.differing > 0) Say(one.name, one.Text());
      *equal += one.differing == 0 ? 1 : 0;
    }
    return absl::OkStatus();
  }

  CheckpointReader& a_;
  CheckpointReader& b_;
  const DiffOptions& options_;
  std::ostream& out_;
  std::vector<std::pair<std::string, std::string>> lines_;
  std::map<std::string, int> times_;  // by how they differ
  int differ_ = 0;
};

}  // namespace

absl::StatusOr<int> DiffCheckpoints(const std::string& dir_a,
                                    const std::string& dir_b,
                                    const DiffOptions& options,
                                    std::ostream* out, FileSystem* files) {
  TESSERA_ASSIGN_OR_RETURN(CheckpointReader a,
                           CheckpointReader::OpenToStay(dir_a, files));
  TESSERA_ASSIGN_OR_RETURN(CheckpointReader b,
                           CheckpointReader::OpenToStay(dir_b, files));
  return Difference(&a, &b, options, out).Run();
}

}  // namespace tessera
