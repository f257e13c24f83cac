#include "comm/gloo/gloo_peers.h"

#include <cstdint>
#include <memory>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/torch/tensor_over.h"
#include "comm/connect/job_secret.h"
#include "comm/connect/keyed_hash.h"

namespace tessera {
namespace {

constexpr size_t kNonceBytes = 16;
// The tag of no other message: those of collectives come later.
constexpr uint32_t kTag = 0;

// What messages point into.
struct Texts {
  std::vector<std::string> ours, theirs, proofs, proved;
};

// To and from each other rank a text of equal size.
absl::Status Exchange(GlooLinks& transport, int rank, size_t bytes,
                      std::vector<std::string>& out,
                      std::vector<std::string>* in) {
  std::vector<std::shared_ptr<GlooLinks::Message>> messages;
  in->assign(out.size(), std::string(bytes, 0));
  for (size_t peer = 0; peer < out.size(); ++peer) {
    if (static_cast<int>(peer) == rank) continue;
    messages.push_back(transport.Receive(BytesOver((*in)[peer].data(), bytes),
                                         static_cast<int>(peer), kTag));
    messages.push_back(transport.Send(BytesOver(out[peer].data(), bytes),
                                      static_cast<int>(peer), kTag));
  }
  for (const auto& message : messages) {
    TESSERA_RETURN_IF_ERROR(transport.Wait(*message));
  }
  return absl::OkStatus();
}

std::string Proof(const std::string& key, int from, int to,
                  const std::string& question, const std::string& answer) {
  return KeyedHash(key,
                   {absl::StrCat(from), absl::StrCat(to), question, answer});
}

}  // namespace

absl::Status ProvePeers(GlooLinks& transport, int rank, int world_size,
                        const std::string& token,
                        std::shared_ptr<void>* memory) {
  const std::string key = JobKey("gloo", token);
  const auto texts = std::make_shared<Texts>();
  *memory = texts;
  auto& [ours, theirs, proofs, proved] = *texts;
  ours.resize(world_size);
  proofs.resize(world_size);
  for (std::string& nonce : ours) nonce = RandomBytes(kNonceBytes);
  TESSERA_RETURN_IF_ERROR(
      Exchange(transport, rank, kNonceBytes, ours, &theirs));
  for (int r = 0; r < world_size; ++r) {
    proofs[r] = Proof(key, rank, r, theirs[r], ours[r]);
  }
  TESSERA_RETURN_IF_ERROR(
      Exchange(transport, rank, kHashBytes, proofs, &proved));
  for (int r = 0; r < world_size; ++r) {
    if (r == rank ||
        SameHash(proved[r], Proof(key, r, rank, ours[r], theirs[r]))) {
      continue;
    }
    return absl::PermissionDeniedError(
        absl::StrCat("gloo: a process that is not of this job has connected "
                     "instead of rank ",
                     transport.NameOf(r), "; start the job again"));
  }
  return absl::OkStatus();
}

}  // namespace tessera
