// The look of the pages that Tessera writes (report/report_page.h, and
// base/step_memory/memory_timeline.h): one style sheet and one palette, so that
// a colour means the same on each. Pages have no scripts and load nothing; they
// are light or dark as the reader's system is.
//
// A drawing has an SVG that is stretched over its place (class "plot"), and
// its words are HTML above it: they keep their size on a telephone.
#ifndef BASE_PAGE_PAGE_STYLE_H_
#define BASE_PAGE_PAGE_STYLE_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tessera {

// The palette has so many colours: the style sheet's --c0, --c1, ... The
// classes sN, fN and bN stroke, fill and paint a background with colour N.
inline constexpr int kPageColors = 9;

// How the titles of pages of a step's memory begin; ", rank N" is their end. A
// report finds them by this.
inline constexpr char kMemoryPageTitle[] = "Memory of ";

// Returns the beginning of a page, up to and with <main>. `title` is HTML.
std::string PageHead(absl::string_view title);

// Returns the colour of a kind of memory, "parameters" (HeldKindName): the same
// on all pages. A kind that is not known has that of "other".
int MemoryKindColor(absl::string_view kind);

}  // namespace tessera
#endif  // BASE_PAGE_PAGE_STYLE_H_
