// Tessera's version, as checkpoints record it.
#ifndef ENGINE_API_VERSION_H_
#define ENGINE_API_VERSION_H_

namespace tessera {

inline constexpr char kTesseraVersion[] = "0.1.0";

}  // namespace tessera
#endif  // ENGINE_API_VERSION_H_
