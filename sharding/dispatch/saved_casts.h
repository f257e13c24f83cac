// Casts of parameters, saved for backward as recipes.
//
// Autocast, or `w.to(torch::kBFloat16)` by hand, copies a parameter into
// another dtype. If autograd kept these copies, all parameters would be held
// whole from forward to backward. So a saved tensor that lies in such a copy
// becomes "this view of a cast to that dtype of that view of a parameter, at
// that version"; backward gathers the flat and casts again, to the same bits.
//
// Unlike a copy, a recipe does not outlive a change of its parameter: a Step
// between forward and backward gives the version error that it gives without a
// cast. A write into the cast that no version counter sees (through a raw
// pointer or .data()) is not seen by backward either.
//
// Threads: any.
#ifndef SHARDING_DISPATCH_SAVED_CASTS_H_
#define SHARDING_DISPATCH_SAVED_CASTS_H_

#include <memory>

#include "ATen/core/Tensor.h"
#include "sharding/flat/flat_parameter.h"

namespace tessera {

// Remembers that `cast` is a fresh copy of `source`, if a flat owns `source`
// and the copy is in another dtype. Keeps neither alive. LOCAL.
void RememberCast(const at::Tensor& source, const at::Tensor& cast);

// What a saved tensor keeps instead of a cast.
class SavedCast {
 public:
  // Makes the recipe of `tensor`. Null unless it lies in a remembered cast,
  // neither the cast nor its parameter has changed since, and a flat still owns
  // the parameter. LOCAL.
  static std::unique_ptr<SavedCast> Of(const at::Tensor& tensor);

  virtual ~SavedCast() = default;
  virtual const std::shared_ptr<FlatParameter>& flat() const = 0;
  // Throws libtorch's version error if the parameter, or the saved tensor, has
  // changed since.
  virtual void CheckVersions() const = 0;
  // Makes the saved tensor anew, without history. REQUIRES: the flat is pinned.
  virtual at::Tensor Make() const = 0;
};

}  // namespace tessera
#endif  // SHARDING_DISPATCH_SAVED_CASTS_H_
