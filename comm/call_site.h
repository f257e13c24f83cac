// CallSite: a place in the source, taken where a default argument is filled in.
//
//   void Reduce(Tensor t, CallSite site = CallSite::Here());  // of the caller
#ifndef COMM_CALL_SITE_H_
#define COMM_CALL_SITE_H_

namespace tessera {

struct CallSite {
  const char* file = "";  // from the workspace's root; a literal
  int line = 0;

  static constexpr CallSite Here(const char* file = __builtin_FILE(),
                                 int line = __builtin_LINE()) {
    return {file, line};
  }
};

}  // namespace tessera
#endif  // COMM_CALL_SITE_H_
