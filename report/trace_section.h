// Shows traces as a section of a page.
#ifndef REPORT_TRACE_SECTION_H_
#define REPORT_TRACE_SECTION_H_

#include <string>

#include "report/trace_summary.h"

namespace tessera {

// Returns a bar for each step, and tables of waits and ranks.
std::string TraceSection(const TraceSummary& summary);

}  // namespace tessera
#endif  // REPORT_TRACE_SECTION_H_
