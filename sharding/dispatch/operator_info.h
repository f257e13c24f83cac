// OperatorInfo: what the fallback must know of an operator, from its schema. It
// is looked up once per operator and thread, then cached.
//
// Which arguments it may write:
//   aten::       those of which the schema says so, and running statistics,
//                which the schemas of the old normalisations leave out
//   c10d::       all; its schemas say nothing of writes
//   others       those of which the schema says so; all if it was inferred from
//                a C++ signature (libtorch's AliasAnalysisKind::CONSERVATIVE)
#ifndef SHARDING_DISPATCH_OPERATOR_INFO_H_
#define SHARDING_DISPATCH_OPERATOR_INFO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/dispatch/Dispatcher.h"
#include "ATen/core/stack.h"
#include "sharding/dispatch/cast_inputs.h"

namespace tessera {

struct OperatorInfo {
  enum class Kind {
    // Reads or writes values: all its flats are pinned while it runs.
    kCompute,
    // Makes a view or looks at sizes only: nothing is gathered, and the tag is
    // not excluded below it, so that operators inside of it which do read
    // values (`contiguous` that has to copy) are seen.
    kTransparent,
    // aten::set_: would replace the storage of its first argument.
    kSet,
    // aten::_has_compatible_shallow_copy_type: set_data is about to replace the
    // storage of the first argument with that of the second.
    kSetData,
  };
  Kind kind = Kind::kCompute;
  std::string name;  // "aten::add_"
  // User code cannot run inside of aten operators, so the tag is excluded below
  // them (cost); everywhere else it must be seen (captured weights).
  bool aten = false;
  // It is made of other operators, which autograd sees instead of it.
  bool composite = false;
  // It is aten::_to_copy, which makes the copy of a cast.
  bool copies = false;
  // Which inputs are cast, where its flat casts inputs.
  InputCasts input_casts = InputCasts::kNone;
  // It overwrites its first argument completely, without reading it.
  bool overwrites = false;
  // It may draw random numbers.
  bool may_draw = false;
  // It is an operator of c10d, which returns before it has finished.
  bool c10d = false;
  // Per argument: whether it may be written, see above.
  std::vector<bool> writes;
  // It is a user's operator whose schema declares all that it writes: other
  // writes are the user's mistake (sharding/dispatch/undeclared_writes.h).
  bool promises = false;
  // Whether it is unknown what it writes: all of its arguments count as written
  // then.
  bool writes_are_guessed() const { return !aten && !promises; }
  // Per argument: whether it is a running statistic that the operator updates.
  // Empty: none.
  std::vector<bool> statistics;
  // The boolean argument that says whether it updates statistics; -1: always.
  int updates = -1;

  // Whether a call with the arguments on top of the stack updates argument `i`
  // as a running statistic.
  bool UpdatesStatistic(const torch::jit::Stack& stack, size_t i) const {
    if (statistics.empty() || !statistics[i]) return false;
    return updates < 0 ||
           stack[stack.size() - writes.size() + static_cast<size_t>(updates)]
               .toBool();
  }
  // Whether a call may write its argument `i`.
  bool MayWrite(const torch::jit::Stack& stack, size_t i) const {
    return writes[i] || UpdatesStatistic(stack, i);
  }

  static const OperatorInfo& Of(const c10::OperatorHandle& op);
};

}  // namespace tessera
#endif  // SHARDING_DISPATCH_OPERATOR_INFO_H_
