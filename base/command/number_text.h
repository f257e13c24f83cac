// Writes numbers for people.
#ifndef BASE_COMMAND_NUMBER_TEXT_H_
#define BASE_COMMAND_NUMBER_TEXT_H_

#include <cstdint>
#include <string>

namespace tessera {

// Returns "10,893,312".
std::string Grouped(int64_t number);

// Returns a time with two units at most: "42 us", "1.5 s", "14 min 16 s",
// "3 h 20 min".
std::string TimeText(double seconds);

}  // namespace tessera
#endif  // BASE_COMMAND_NUMBER_TEXT_H_
