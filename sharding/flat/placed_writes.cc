#include "sharding/flat/placed_writes.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/bits.h"
#include "base/torch/torch_scope.h"

namespace tessera {
namespace {

uint64_t PrintOf(const FlatDescription& flat, const FlatBuffer& whole,
                 int slot) {
  TorchScope scope;
  const at::Tensor bytes = whole.Bytes(flat.layout().slot(slot)).cpu();
  return Fingerprint(bytes.const_data_ptr(),
                     static_cast<int64_t>(bytes.nbytes()));
}

constexpr absl::string_view kOtherWrite;

// Neither is in a name. A write is: unit, slot, fingerprint ("?" of others),
// parameter, operator.
constexpr char kEndOfField = '\1', kEndOfWrite = '\2';
constexpr absl::string_view kOther = "?";

struct Write {
  std::string print = "0", parameter, op;
};
// By unit and slot.
using Writes = std::map<std::pair<std::string, std::string>, Write>;

Writes WritesOf(absl::string_view text) {
  Writes writes;
  for (const absl::string_view each :
       absl::StrSplit(text, kEndOfWrite, absl::SkipEmpty())) {
    const std::vector<std::string> fields = absl::StrSplit(each, kEndOfField);
    writes[{fields[0], fields[1]}] = {fields[2], fields[3], fields[4]};
  }
  return writes;
}

absl::Status Differ(const std::string& unit, const Write& write,
                    absl::string_view where, size_t rank) {
  return absl::FailedPreconditionError(absl::StrCat(
      where, ": [", unit, "] parameter '", write.parameter, "' was written by ",
      write.op,
      " at places that depend on its input, and what was written differs "
      "between rank 0 and rank ",
      rank,
      ": the parameter is no longer the same on all ranks; make the same "
      "writes "
      "on all ranks: give the operator the same input, or write after Step "
      "(Engine::Summon); of nn::Embedding leave max_norm out and scale its "
      "rows "
      "there"));
}

}  // namespace

void PlacedWrites::Entry::Fold() {
  if (after != before) changes = MixBits((changes + kMixStep) ^ after);
  before = after;
}

// Ranks may come to other borders in between, so what is compared is the bytes
// that are there at last, and not how they came.
void PlacedWrites::Note(const FlatDescription& flat, const FlatBuffer& whole,
                        int slot, absl::string_view op) {
  auto entry = std::find_if(entries_.begin(), entries_.end(),
                            [&](const Entry& e) { return e.slot == slot; });
  const bool first = entry == entries_.end();
  if (first) {
    entry = entries_.insert(entries_.end(), Entry{slot, std::string(op)});
  }
  if (op == kOtherWrite) entry->op = std::string(op);
  if (entry->open || entry->op == kOtherWrite) return;
  entry->open = true;
  const uint64_t now = PrintOf(flat, whole, slot);
  if (!first && now == entry->after) return;
  if (!first) entry->Fold();
  entry->before = entry->after = now;
}

void PlacedWrites::Close(const FlatDescription& flat, const FlatBuffer& whole) {
  for (Entry& entry : entries_) {
    if (!entry.open) continue;
    entry.open = false;
    entry.after = PrintOf(flat, whole, entry.slot);
  }
}

std::string PlacedWrites::Take(const FlatDescription& flat) {
  const absl::string_view end(&kEndOfField, 1);
  std::string text;
  for (Entry& entry : entries_) {
    entry.Fold();
    const bool other = entry.op == kOtherWrite;
    if (entry.changes == 0 && !other) continue;
    absl::StrAppend(&text, flat.name(), end, entry.slot, end);
    if (other) {
      absl::StrAppend(&text, kOther, end, end);
    } else {
      absl::StrAppend(&text, absl::Hex(entry.changes), end,
                      flat.ParameterOfSlot(entry.slot).name, end, entry.op);
    }
    text += kEndOfWrite;
  }
  entries_.clear();
  return text;
}

absl::Status ComparePlacedWrites(absl::Span<const absl::string_view> all,
                                 absl::string_view where) {
  if (std::all_of(all.begin(), all.end(),
                  [&](absl::string_view text) { return text == all[0]; })) {
    return absl::OkStatus();
  }
  std::vector<Writes> ranks;
  Writes any;  // of each what some rank says
  for (const absl::string_view text : all) {
    ranks.push_back(WritesOf(text));
    for (const auto& [place, write] : ranks.back()) {
      Write& seen = any[place];
      if (seen.print != kOther) seen = write;
    }
  }
  for (const auto& [place, write] : any) {
    if (write.print == kOther) continue;
    for (size_t rank = 1; rank < ranks.size(); ++rank) {
      if (ranks[rank][place].print == ranks[0][place].print) continue;
      return Differ(place.first, write, where, rank);
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
