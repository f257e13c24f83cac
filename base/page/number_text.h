// Writes numbers in text files such that readers get the same bits.
#ifndef BASE_PAGE_NUMBER_TEXT_H_
#define BASE_PAGE_NUMBER_TEXT_H_

#include <string>

namespace tessera {

// Returns the shortest decimal that is read back as `value`: "0.1", "1e-05",
// "3"; for what is not finite Python's "nan", "inf" or "-inf".
std::string NumberText(double value);
// Returns NumberText for JSON, which has no word for what is not finite: then a
// string, "NaN", "Infinity" or "-Infinity" (which JavaScript's Number() and
// Python's float() read).
std::string JsonNumberText(double value);

}  // namespace tessera
#endif  // BASE_PAGE_NUMBER_TEXT_H_
