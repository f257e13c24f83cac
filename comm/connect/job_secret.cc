#include "comm/connect/job_secret.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/env.h"
#include "base/status.h"
#include "comm/connect/keyed_hash.h"
#include "comm/connect/private_file.h"

namespace tessera {
namespace {

constexpr size_t kLeast = 16;
constexpr size_t kMost = 4096;  // more is no secret, but some other file

ABSL_CONST_INIT absl::Mutex g_mutex(absl::kConstInit);
std::string& Secret() ABSL_EXCLUSIVE_LOCKS_REQUIRED(g_mutex) {
  static auto* const secret = new std::string;
  return *secret;
}

absl::Status Error(absl::StatusCode code, const std::string& path,
                   absl::string_view what) {
  return absl::Status(
      code, absl::StrCat(kJobSecretFileVariable, "=", path, ": ", what));
}

absl::StatusOr<std::string> ReadSecretFile(const std::string& path) {
  // Not to wait for whoever would write into a FIFO.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    return Error(absl::StatusCode::kUnavailable, path, std::strerror(errno));
  }
  struct stat file;
  std::string fault;
  if (fstat(fd, &file) == 0) fault = WhyNotPrivate(file);
  std::string text(kMost + 1, 0);
  const ssize_t got = fault.empty() ? read(fd, &text[0], text.size()) : 0;
  const int error = errno;
  close(fd);
  if (!fault.empty()) {
    return Error(absl::StatusCode::kPermissionDenied, path,
                 absl::StrCat(fault,
                              "; expected a file for this user alone "
                              "(chmod 600), or "
                              "the secret itself in ",
                              kJobSecretVariable));
  }
  if (got < 0) {
    return Error(absl::StatusCode::kUnavailable, path, std::strerror(error));
  }
  if (static_cast<size_t>(got) > kMost) {
    return Error(absl::StatusCode::kInvalidArgument, path,
                 absl::StrCat("expected ", kMost, " bytes at most"));
  }
  text.resize(got);
  return std::string(absl::StripAsciiWhitespace(text));
}

}  // namespace

std::string NewJobSecret() {
  return absl::StrCat(RandomToken(), RandomToken());
}

absl::StatusOr<std::string> FindJobSecret() {
  const std::optional<std::string> path = EnvString(kJobSecretFileVariable);
  std::optional<std::string> secret = EnvString(kJobSecretVariable);
  std::string name = kJobSecretVariable;
  if (path && secret) {
    return absl::InvalidArgumentError(
        absl::StrCat("both ", kJobSecretVariable, " and ",
                     kJobSecretFileVariable, " are set: unset one of them"));
  }
  if (path) {
    TESSERA_ASSIGN_OR_RETURN(secret, ReadSecretFile(*path));
    name = absl::StrCat(kJobSecretFileVariable, "=", *path);
  }
  if (!secret) return "";
  if (secret->size() < kLeast) {
    return absl::InvalidArgumentError(absl::StrCat(
        name, ": expected a secret of ", kLeast, " characters at least, got ",
        secret->size(), " (openssl rand -hex 32 makes one)"));
  }
  return *secret;
}

void SetJobSecret(std::string secret) {
  absl::MutexLock lock(&g_mutex);
  Secret() = std::move(secret);
}

bool HasJobSecret() {
  absl::MutexLock lock(&g_mutex);
  return !Secret().empty();
}

std::string JobKey(absl::string_view purpose, absl::string_view words) {
  absl::MutexLock lock(&g_mutex);
  return KeyOfSecret(Secret(), purpose, words);
}

std::string KeyOfSecret(absl::string_view secret, absl::string_view purpose,
                        absl::string_view words) {
  return KeyedHash(secret, {"tessera", purpose, words});
}

}  // namespace tessera
