// A header of the program's own. Tessera has one of this name and guard.
#ifndef CONFIG_CONFIG_H_
#define CONFIG_CONFIG_H_

constexpr int kOwnBatch = 16;  // samples

#endif  // CONFIG_CONFIG_H_
