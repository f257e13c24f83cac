#include "comm/rendezvous/store_table.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tessera {
namespace {

StoreMessage Ok(std::string result) { return {"ok", std::move(result)}; }

StoreMessage Error(absl::string_view why) {
  return {"error", std::string(why)};
}

bool Waits(const std::string& op) { return op == "get" || op == "wait"; }

}  // namespace

StoreTable::Answers StoreTable::Handle(Client client, StoreMessage request) {
  Answers answers;
  if (request.empty() || waiting_.count(client) > 0) {
    answers.emplace_back(client, Error("a request out of turn"));
    return answers;
  }
  if (!Waits(request[0])) {
    answers.emplace_back(client, Apply(request));
    // Whatever it did; who still misses something goes on waiting.
    if (request.size() > 1) Wake(request[1], &answers);
    return answers;
  }
  if (HasAll(request)) {
    answers.emplace_back(client, Read(request));
    return answers;
  }
  const auto missing = std::find_if(
      request.begin() + 1, request.end(),
      [&](const std::string& key) { return values_.count(key) == 0; });
  awaited_.emplace(*missing, client);
  waiting_.emplace(client, std::move(request));
  return answers;
}

void StoreTable::Wake(const std::string& key, Answers* answers) {
  if (values_.count(key) == 0) return;
  const auto range = awaited_.equal_range(key);
  std::vector<Client> woken;
  for (auto it = range.first; it != range.second; ++it) {
    woken.push_back(it->second);
  }
  awaited_.erase(range.first, range.second);
  for (Client client : woken) {
    StoreMessage request = std::move(waiting_[client]);
    waiting_.erase(client);
    for (auto& answer : Handle(client, std::move(request))) {
      answers->push_back(std::move(answer));
    }
  }
}

void StoreTable::Forget(Client client) {
  if (waiting_.erase(client) == 0) return;
  const auto it = std::find_if(
      awaited_.begin(), awaited_.end(),
      [&](const auto& awaited) { return awaited.second == client; });
  if (it != awaited_.end()) awaited_.erase(it);
}

bool StoreTable::HasAll(const StoreMessage& request) const {
  return std::all_of(
      request.begin() + 1, request.end(),
      [this](const std::string& key) { return values_.count(key) > 0; });
}

StoreMessage StoreTable::Read(const StoreMessage& request) const {
  StoreMessage answer = {"ok"};
  if (request[0] == "wait") return answer;
  for (size_t i = 1; i < request.size(); ++i) {
    answer.push_back(values_.at(request[i]));
  }
  return answer;
}

StoreMessage StoreTable::Apply(const StoreMessage& request) {
  const std::string& op = request[0];
  const size_t count = request.size() - 1;
  if (op == "check") return Ok(HasAll(request) ? "1" : "0");
  if (op == "count" && count == 0) return Ok(absl::StrCat(values_.size()));
  if (op == "delete" && count == 1) {
    return Ok(absl::StrCat(values_.erase(request[1])));
  }
  if (op == "set" && count == 2) {
    values_[request[1]] = request[2];
    return {"ok"};
  }
  if (op == "append" && count == 2) {
    std::string& value = values_[request[1]];
    if (value.size() + request[2].size() > kMaxStoreMessage / 2) {
      return Error("the value grows too large");
    }
    value += request[2];
    return {"ok"};
  }
  if (op == "add" && count == 2) return Add(request[1], request[2]);
  if (op == "swap" && count == 3) return Swap(request);
  return Error("an unknown request");
}

StoreMessage StoreTable::Add(const std::string& key,
                             const std::string& number) {
  const auto it = values_.find(key);
  int64_t sum = 0, more = 0, old = 0;
  if (!absl::SimpleAtoi(number, &more) ||
      (it != values_.end() && !absl::SimpleAtoi(it->second, &old)) ||
      __builtin_add_overflow(old, more, &sum)) {
    return Error("not a number");
  }
  values_[key] = absl::StrCat(sum);
  return Ok(absl::StrCat(sum));
}

StoreMessage StoreTable::Swap(const StoreMessage& request) {
  const auto it = values_.find(request[1]);
  const std::string& expected = request[2];
  if (it == values_.end()) {
    if (!expected.empty()) return Ok(expected);
    values_[request[1]] = request[3];
    return Ok(request[3]);
  }
  if (it->second == expected) it->second = request[3];
  return Ok(it->second);
}

}  // namespace tessera
