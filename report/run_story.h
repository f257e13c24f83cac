// Tells how a run went: when it was started and resumed, on how many ranks, how
// long it took and how it ended, from what run.json and the times in
// metrics.jsonl say.
#ifndef REPORT_RUN_STORY_H_
#define REPORT_RUN_STORY_H_

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "report/run_files.h"

namespace tessera {

struct RunStory {
  // The run went on from a checkpoint of `step`. Those whose steps were made
  // anew later are left out.
  struct Resume {
    double step = 0;
    int ranks = 0;              // 0: not known
    bool other_ranks = false;   // than before
    std::string Title() const;  // "resumed at step 100 on 3 ranks"
  };
  std::vector<Resume> resumes;
  int first_ranks = 0;  // of the process that began at the first step
  // Unix seconds of that process's start, and the time that it and those that
  // went on from it took. NaN: not known.
  double started = std::numeric_limits<double>::quiet_NaN();
  double seconds = 0;
  // "finished", "ended", "failed", "still running, or killed"; "" where
  // run.json is of a version that does not tell.
  std::string state;
  // All figures are of processes before the last one, which has written no
  // step.
  bool last_start_has_no_step = false;
  // The number of the first row (RunFiles::steps) of the last process.
  size_t last_process = 0;
};

RunStory StoryOf(const RunFiles& run);

// Returns the head of the page: the model, how the run went, on what it ran.
std::string HeadlineHtml(const RunFiles& run, const RunStory& story);

}  // namespace tessera
#endif  // REPORT_RUN_STORY_H_
