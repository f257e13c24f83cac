#include "comm/record/comm_log.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/env.h"
#include "base/json.h"
#include "base/log.h"
#include "base/trace/trace.h"

namespace tessera {
namespace {

constexpr char kHeader[] =
    "operation           calls            bytes    total ms     mean ms      "
    "max ms  alg GB/s  bus GB/s  for\n";

absl::Status WriteFile(const std::string& path, const std::string& text) {
  FILE* const file = std::fopen(path.c_str(), "we");
  bool ok = file != nullptr;
  if (ok) ok = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  if (file != nullptr) ok = std::fclose(file) == 0 && ok;
  if (ok) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("cannot write ", path, ": ", std::strerror(errno)));
}

// Ranks whose calls match have the same group and sequence, so that those who
// read several files find them.
void Trace(const CollectiveRecord& record) {
  const bool pull = record.op == CollectiveOp::kPull;
  AddTraceSpan(
      {pull ? TraceTrack::kPulls : TraceTrack::kCommunication, record.what,
       absl::ToInt64Nanoseconds(record.entered),
       absl::ToInt64Nanoseconds(record.left),
       std::string(UnitInText(record.what)), record.bytes,
       absl::StrFormat(
           "\"op\":\"%s\",\"sequence\":%d,\"group\":%s,"
           "\"queued_us\":%.3f,\"what\":%s,\"site\":%s,"
           "\"status\":%s",
           CollectiveName(record.op), record.sequence, QuoteJson(record.group),
           absl::ToDoubleMicroseconds(record.entered - record.enqueued),
           QuoteJson(record.Describe()),
           QuoteJson(absl::StrCat(record.site.file, ":", record.site.line)),
           QuoteJson(record.status.ok() ? "ok" : record.status.message()))});
}

}  // namespace

double BusFactor(CollectiveOp op, int world_size) {
  const int passes = TraitsOf(op).bus_passes;
  if (passes == 0) return 1;
  return passes * static_cast<double>(world_size - 1) / world_size;
}

CommLog::CommLog(Options options) : options_(options), begin_(MonotonicNow()) {}

void CommLog::Add(const CollectiveRecord& record) {
  if (TraceRecords()) Trace(record);
  const absl::Duration took = record.left - record.entered;
  absl::MutexLock lock(&mutex_);
  auto sum = units_.find({record.what, record.op});
  if (sum == units_.end()) {
    const std::string name =
        units_.size() < kMaxUnits ? record.what : "(others)";
    sum = units_.emplace(std::make_pair(name, record.op), Sum()).first;
  }
  sum->second.Add({1, !record.status.ok(), record.bytes, took, took});
}

void CommLog::Sum::Add(const Sum& other) {
  calls += other.calls;
  failed += other.failed;
  bytes += other.bytes;
  total += other.total;
  longest = std::max(longest, other.longest);
}

void CommLog::AddWait(int peer, absl::Duration waited) {
  absl::MutexLock lock(&mutex_);
  waits_.resize(options_.world_size);
  waits_[peer] += waited;
}

std::vector<absl::Duration> CommLog::waits() const {
  absl::MutexLock lock(&mutex_);
  return waits_;
}

void CommLog::AddRow(absl::string_view name, CollectiveOp op, const Sum& sum,
                     std::string* text) const {
  const double seconds = absl::ToDoubleSeconds(sum.total);
  const double rate = seconds > 0 ? sum.bytes / seconds / 1e9 : 0;
  absl::StrAppendFormat(
      text, "%-15s %9d %16d %11.1f %11.3f %11.3f  %8.3f  %8.3f  %s",
      CollectiveName(op), sum.calls, sum.bytes, seconds * 1e3,
      seconds * 1e3 / sum.calls, absl::ToDoubleMilliseconds(sum.longest), rate,
      rate * BusFactor(op, options_.world_size), name);
  if (sum.failed > 0) absl::StrAppend(text, " (", sum.failed, " failed)");
  absl::StrAppend(text, "\n");
}

std::string CommLog::ToText(absl::string_view backend,
                            double least_share) const {
  absl::MutexLock lock(&mutex_);
  Sum all;
  std::map<CollectiveOp, Sum> ops;
  std::vector<std::pair<absl::Duration, Sums::const_iterator>> longest_first;
  for (auto it = units_.begin(); it != units_.end(); ++it) {
    ops[it->first.second].Add(it->second);
    all.Add(it->second);
    longest_first.emplace_back(-it->second.total, it);
  }
  std::stable_sort(
      longest_first.begin(), longest_first.end(),
      [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string text = absl::StrFormat(
      "collectives of rank %d of %d%s%s, %s, in %.3f s\n%s", options_.rank,
      options_.world_size, options_.group.empty() ? "" : " of group ",
      options_.group, backend, absl::ToDoubleSeconds(MonotonicNow() - begin_),
      kHeader);
  for (const auto& [op, sum] : ops) AddRow("all", op, sum, &text);
  absl::StrAppend(&text, "by unit\n", kHeader);
  Sum hidden;
  int64_t rows_hidden = 0;
  for (const auto& [total, it] : longest_first) {
    const Sum& sum = it->second;
    if (sum.failed == 0 && sum.total < least_share * all.total) {
      hidden.Add(sum);
      ++rows_hidden;
      continue;
    }
    AddRow(it->first.first, it->first.second, sum, &text);
  }
  if (rows_hidden > 0) {
    absl::StrAppendFormat(&text, "(%d more row%s, %.1f ms in all)\n",
                          rows_hidden, rows_hidden == 1 ? "" : "s",
                          absl::ToDoubleMilliseconds(hidden.total));
  }
  for (size_t r = 0; r < waits_.size(); ++r) {
    if (static_cast<int>(r) == options_.rank) continue;
    absl::StrAppendFormat(&text, "waited for rank %d: %.3f ms\n", r,
                          absl::ToDoubleMilliseconds(waits_[r]));
  }
  return text;
}

absl::Status WriteCommLog(const std::string& report, int rank) {
  const std::optional<std::string> log = EnvString("TESSERA_COMM_LOG");
  if (!log.has_value() || rank != 0) return absl::OkStatus();
  if (*log != "-") return WriteFile(*log, report);
  log_internal::WriteToStderr(report);
  return absl::OkStatus();
}

}  // namespace tessera
