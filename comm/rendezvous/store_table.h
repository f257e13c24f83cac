// StoreTable: the keys and values of the job's store, and who waits for them.
// Pure: messages in, messages out. No torch.
//
//   request                        answer
//   set KEY VALUE                  ok
//   get KEY...                     ok VALUE...      once all are there
//   wait KEY...                    ok               once all are there
//   check KEY...                   ok 0|1
//   add KEY NUMBER                 ok SUM           an absent key counts as 0
//   append KEY VALUE               ok
//   swap KEY EXPECTED NEW          ok VALUE         sets NEW if the value is
//                                                   EXPECTED, or if both are
//                                                   absent (EXPECTED: "")
//   delete KEY                     ok 0|1
//   count                          ok NUMBER
//
// Each client asks one thing at a time.
//
// Threads: one.
#ifndef COMM_RENDEZVOUS_STORE_TABLE_H_
#define COMM_RENDEZVOUS_STORE_TABLE_H_

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "comm/rendezvous/store_messages.h"

namespace tessera {

class StoreTable {
 public:
  using Client = int64_t;
  using Answers = std::vector<std::pair<Client, StoreMessage>>;

  // Answers to `client`, and to those that have waited for what it did. A
  // request that makes no sense, or comes before the last one's answer, gets
  // "error WHY".
  Answers Handle(Client client, StoreMessage request);
  // It waits for nothing any more.
  void Forget(Client client);

 private:
  bool HasAll(const StoreMessage& request) const;
  StoreMessage Read(const StoreMessage& request) const;
  StoreMessage Apply(const StoreMessage& request);
  StoreMessage Add(const std::string& key, const std::string& number);
  StoreMessage Swap(const StoreMessage& request);
  // Answers the clients that have waited for `key`.
  void Wake(const std::string& key, Answers* answers);

  std::unordered_map<std::string, std::string> values_;
  std::map<Client, StoreMessage> waiting_;  // its request
  // A key that is not there yet, of each of those.
  std::multimap<std::string, Client> awaited_;
};

}  // namespace tessera
#endif  // COMM_RENDEZVOUS_STORE_TABLE_H_
