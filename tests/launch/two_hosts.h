// TwoHosts: two network namespaces with names and /etc/hosts of their own,
// joined by a virtual cable.
//
//   alpha 10.77.0.1 ======veth====== 10.77.0.2 beta     each with a loopback
//
// Each namespace belongs to a child of this program that does nothing else.
// The kernel takes namespace and cable away with the last process in it, and
// all of them die with this program: nothing is left whatever happens. Needs
// root (to make namespaces) and ip.
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

  // `second_name`: the other host's name; that of the first makes it another
  // network of the same host, as containers are. `folder`: for files.
  TwoHosts(const std::string& second_name, const std::string& folder);

  // Why they cannot be made here; "" if they have been.
  const std::string& trouble() const { return trouble_; }
  // For the environment of a Process that is to call EnterIfTold on a host.
  std::pair<std::string, std::string> Place(int host) const;

  // Breaks the cable at this host's end, or mends it. False if it cannot.
  bool SetCable(int host, bool up);

  // In a Process: goes to its host, if it has one, while it has one thread.
  // False, and says why, if it cannot.
  static bool EnterIfTold();
  // At the begin of main: ends the process if it is one of ours.
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
