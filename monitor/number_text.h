// Numbers in text files, so that who reads them has the same bits.
#ifndef MONITOR_NUMBER_TEXT_H_
#define MONITOR_NUMBER_TEXT_H_

#include <string>

namespace tessera {

// The shortest decimal that is read back as `value`: "0.1", "1e-05", "3". Of
// what is not finite Python's words: "nan", "inf", "-inf".
std::string NumberText(double value);
// The same in JSON, which has no word for what is not finite: a string then,
// "NaN", "Infinity", "-Infinity" (which JavaScript's Number() and Python's
// float() read).
std::string JsonNumberText(double value);

}  // namespace tessera
#endif  // MONITOR_NUMBER_TEXT_H_
