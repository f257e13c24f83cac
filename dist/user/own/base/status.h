// A header of the program's own. Tessera has one of this name and guard.
#ifndef BASE_STATUS_H_
#define BASE_STATUS_H_

enum class OwnStatus { kResumed, kVerified };

#endif  // BASE_STATUS_H_
