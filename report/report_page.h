// Writes the page of a run: one HTML file that needs no network and no script,
// light or dark as the reader's system is.
#ifndef REPORT_REPORT_PAGE_H_
#define REPORT_REPORT_PAGE_H_

#include <string>

#include "report/run_files.h"

namespace tessera {

// Returns the page. It is XML, too, so that any parser reads it. Text of files
// is escaped.
std::string ReportPage(const RunFiles& run);

}  // namespace tessera
#endif  // REPORT_REPORT_PAGE_H_
