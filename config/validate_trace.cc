#include "config/config.pb.h"
#include "config/validate.h"

namespace tessera {

void CheckTrace(int world_size, const proto::Trace& section, Faults* faults) {
  if (section.end_step() < section.start_step()) {
    faults->Add("trace.end_step", "expected at least start_step, ",
                section.start_step(), ", got ", section.end_step());
  }
  for (const int64_t rank : section.ranks()) {
    if (rank >= 0 && rank < world_size) continue;
    faults->Add("trace.ranks", "expected ranks of 0 to ", world_size - 1,
                ", got ", rank);
    return;
  }
  if (section.enabled() && section.output_path().empty()) {
    faults->Add("trace.output_path", "expected a folder, got none");
  }
}

void NoteHistograms(const proto::Config& config, Faults* faults) {
  if (config.histograms().every_steps() == 0 ||
      config.tensorboard().enabled() || config.jsonl_monitor().enabled()) {
    return;
  }
  faults->Note(
      "histograms.every_steps",
      "tensorboard and jsonl_monitor, which write histograms, are not "
      "enabled: only the program's own writers get them, if it has any");
}

}  // namespace tessera
