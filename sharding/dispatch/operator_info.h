// OperatorInfo: what the fallback must know of an operator, from its schema.
// Looked up once per operator and thread, then cached.
#ifndef SHARDING_DISPATCH_OPERATOR_INFO_H_
#define SHARDING_DISPATCH_OPERATOR_INFO_H_

#include <cstdint>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "sharding/dispatch/cast_inputs.h"

namespace tessera {

struct OperatorInfo {
  enum class Kind {
    // Reads or writes values: all its flats are pinned while it runs.
    kCompute,
    // Makes a view or looks at sizes only: nothing is gathered, and the tag is
    // not excluded below, so that an operator inside of it which does read
    // values (`contiguous` that has to copy) is seen.
    kTransparent,
    // aten::set_: would replace the storage of its first argument.
    kSet,
    // aten::_has_compatible_shallow_copy_type: set_data is about to replace the
    // storage of the first argument with that of the second.
    kSetData,
  };
  Kind kind = Kind::kCompute;
  // User code cannot run inside of aten operators, so the tag is excluded below
  // them (cost); everywhere else it must be seen (captured weights).
  bool aten = false;
  // aten::_to_copy: makes the copy of a cast.
  bool copies = false;
  // What is done where its flat wants its inputs cast.
  InputCasts input_casts = InputCasts::kNone;
  // Its first argument is written whole, without a look at what was there.
  bool overwrites = false;
  // Operators of c10d return before they have finished.
  bool c10d = false;
  // Per argument: its schema says that it is written, or it might be (operators
  // outside of aten whose schema does not say so, c10d's among them).
  std::vector<bool> writes;

  static const OperatorInfo& Of(const c10::OperatorHandle& op);
};

}  // namespace tessera
#endif  // SHARDING_DISPATCH_OPERATOR_INFO_H_
