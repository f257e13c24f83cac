// FlatStorages: the storages of a flat parameter's parameters.
//
// Every parameter keeps its own TensorImpl, sizes, strides and StorageImpl;
// only the StorageImpl's pointer is moved into the flat buffer while the flat
// is whole, and cleared while it is freed. Parameters that share a storage
// continue to share it. Where the working dtype differs from the parameters'
// original one, they get new StorageImpls until GiveBack, and an alias of the
// old ones throws.
//
// Threads: outside order (FlatParameter's mutex), except for all().
#ifndef SHARDING_FLAT_FLAT_STORAGES_H_
#define SHARDING_FLAT_FLAT_STORAGES_H_

#include <functional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "base/layout/flat_buffer.h"
#include "sharding/copy/flat_description.h"

namespace tessera {

class FlatStorages {
 public:
  // `flat` outlives it. Changes nothing until TakeOver.
  explicit FlatStorages(const FlatDescription* flat);

  // Calls `take` with each slot's number and values, which are elements of the
  // original dtype, and drops its memory: from here on an access throws
  // error_of(name of its first parameter). COLLECTIVE for parameters under
  // construction (sharding/construct/construction.h), else LOCAL and OK.
  absl::Status TakeOver(
      const std::function<void(int slot, const at::Tensor& values)>& take,
      const std::function<std::string(const std::string& parameter)>& error_of);
  // Points the storages into `whole`, or nowhere if that is undefined. Does
  // nothing if they are there already: hidden storages stay hidden then.
  void Follow(const FlatBuffer& whole);
  // Points the storages into `whole` and makes accesses see its values.
  void Show(const FlatBuffer& whole);
  // Points the storages nowhere: accesses throw.
  void Unpoint();
  // Makes accesses throw, as if there were no memory.
  void Hide();
  // Gives every parameter plain memory of its own with these values, [P], in
  // the original dtype, and forgets it. Throws.
  void GiveBack(const at::Tensor& values);
  // Makes accesses throw for good, saying that the engine ended without Close.
  void Abandon();

  // Whether their dtype was changed.
  bool converted() const { return !originals_.empty(); }
  // The storages in slot order; constant from TakeOver on.
  const std::vector<c10::intrusive_ptr<c10::StorageImpl>>& all() const {
    return storages_;
  }

 private:
  absl::Status TakeValues(
      int slot,
      const std::function<void(int slot, const at::Tensor& values)>& take);
  void Convert();

  const FlatDescription& flat_;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> storages_;
  // The parameters' original storages, where their dtype was changed.
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> originals_;
  std::vector<at::ScalarType> original_dtypes_;  // one per slot
  const char* at_ = nullptr;  // begin of the flat buffer that they lie in
};

}  // namespace tessera
#endif  // SHARDING_FLAT_FLAT_STORAGES_H_
