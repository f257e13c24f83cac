// WorldOptionsFrom is in engine/program/start.h.
#ifndef ENGINE_WORLD_OPTIONS_H_
#define ENGINE_WORLD_OPTIONS_H_

#include "engine/program/start.h"  // IWYU pragma: export

#endif  // ENGINE_WORLD_OPTIONS_H_
