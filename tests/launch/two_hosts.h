// TwoHosts are two network namespaces with names and /etc/hosts of their own,
// joined by a virtual cable.
//
//   alpha 10.77.0.1 ======veth====== 10.77.0.2 beta     each with a loopback
//
// Each namespace belongs to a child of this program that does nothing else. The
// kernel removes namespace and cable with the last process in it, and all of
// them die with this program, so nothing is left in any case. It needs root (to
// make namespaces) and ip.
#ifndef TESTS_LAUNCH_TWO_HOSTS_H_
#define TESTS_LAUNCH_TWO_HOSTS_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/process.h"

namespace tessera {

class TwoHosts {
 public:
  static constexpr const char* kAddresses[] = {"10.77.0.1", "10.77.0.2"};

  // `second_name` is the other host's name; if it is that of the first, the
  // other is another network of the same host, as containers are. `folder` is
  // for files.
  TwoHosts(const std::string& second_name, const std::string& folder);

  // Returns why they cannot be made here; "" if they have been.
  const std::string& trouble() const { return trouble_; }
  // Returns a variable for a Process that calls EnterIfTold on a host.
  std::pair<std::string, std::string> Place(int host) const;

  // Breaks or restores the cable at this host's end. Returns false if it
  // cannot.
  bool SetCable(int host, bool up);

  // Call it in a Process while it has one thread: moves to its host, if it has
  // one. Returns false, with a message, if it cannot.
  static bool EnterIfTold();
  // Call it at the beginning of main: serves and ends the process if it is one
  // of ours.
  static void ServeIfHelper(int argc, char** argv);

 private:
  bool Start(const std::string& name, const std::string& path,
             const std::string& hosts);
  bool Ip(const std::string& arguments, int host = -1);

  std::vector<std::unique_ptr<Process>> holders_;
  std::string trouble_;
};

}  // namespace tessera
#endif  // TESTS_LAUNCH_TWO_HOSTS_H_
