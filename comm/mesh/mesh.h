// Mesh: the ranks of a job, arranged along named axes. An axis is a direction
// in which a model or its data is divided; the ranks that differ on it alone
// are a group of it.
//
//   {"dp_replicate", 2}, {"dp_shard", 3}:   outermost first, row-major
//
//                      dp_shard 0 1 2
//     dp_replicate 0   ranks    0 1 2       a row is a group of dp_shard
//     dp_replicate 1   ranks    3 4 5       a column is one of dp_replicate
//
// So the ranks of the innermost axis are neighbours, which launchers put on one
// host: the axis with the most traffic belongs there.
//
// Words, as torch's DeviceMesh and DeepSpeed have them: dp are the ranks that
// have samples of their own, cp (context parallel) those that have parts of the
// same sequences. dp_cp is both together: the ranks over which gradients are
// summed up, of which dp_replicate and dp_shard (HSDP) say how states lie there.
// tp has the parts of one model's layers, pp its layers one after another. The
// job is all ranks, of which one prints and writes files. A mean or a count of
// samples is over dp; a norm is over the job, where each element counts once.
//
// Order. All groups of a mesh fail together (comm/watch/failure_domain.h), and
// one communication thread issues their collectives in the order of the calls,
// so all ranks must call the collectives of all axes in one order, as they must
// those of one group. Two ranks that call those of two axes in different
// orders wait for each other.
//
// Threads: none; one at a time.
#ifndef COMM_MESH_MESH_H_
#define COMM_MESH_MESH_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "comm/communicator.h"

namespace tessera {

inline constexpr absl::string_view kDpCp = "dp_cp";
inline constexpr absl::string_view kDp = "dp";
inline constexpr absl::string_view kCp = "cp";
inline constexpr absl::string_view kDpReplicate = "dp_replicate";
inline constexpr absl::string_view kDpShard = "dp_shard";
inline constexpr absl::string_view kTp = "tp";
inline constexpr absl::string_view kPp = "pp";

struct MeshAxis {
  std::string name;
  int size = 1;
  std::string what;  // its groups in messages; empty: the name
};

class Mesh {
 public:
  // Arranges the ranks of `job` along `axes`, outermost first. LOCAL.
  // InvalidArgument if a name is empty or comes twice, if a size is below 1, or
  // if the sizes do not make up the job's ranks.
  static absl::StatusOr<std::shared_ptr<Mesh>> Create(
      std::shared_ptr<Communicator> job, std::vector<MeshAxis> axes);

  // Divides an axis into `parts`, outermost first: from then on these are axes,
  // too, and the axis counts them row-major. LOCAL. InvalidArgument if there is
  // no such axis, as Create for a part's name and size, or if the sizes do not
  // make up the axis.
  absl::Status Divide(absl::string_view axis, std::vector<MeshAxis> parts);

  const std::shared_ptr<Communicator>& job() const { return job_; }
  // Where this rank is on an axis, and how many there are. REQUIRES: it exists.
  int coordinate(absl::string_view axis) const;
  int size(absl::string_view axis) const { return Get(axis).size; }
  // Returns the ranks of this one's group of an axis, as of the job, ascending.
  // REQUIRES: it exists.
  std::vector<int> ranks(absl::string_view axis) const;

  // Makes this rank's group of an axis, unless there is one. COLLECTIVE over
  // the job, as Communicator::Split, with its errors; LOCAL where the group is
  // the job, or was made before (of an axis with the same ranks, too).
  // InvalidArgument if there is no such axis.
  absl::Status MakeGroup(absl::string_view axis);
  // Returns the group that MakeGroup has made; null: it was not called.
  // REQUIRES: the axis exists.
  const std::shared_ptr<Communicator>& group(absl::string_view axis) const {
    return Get(axis).group;
  }

 private:
  struct Axis : MeshAxis {
    int64_t stride = 1;  // from one of its ranks to the next, as of the job
    std::shared_ptr<Communicator> group;  // null: not made yet
  };

  explicit Mesh(std::shared_ptr<Communicator> job) : job_(std::move(job)) {}
  absl::Status AddAll(const std::string& of, int64_t size, int64_t stride,
                      std::vector<MeshAxis> axes);
  absl::StatusOr<size_t> Find(absl::string_view name) const;  // in axes_
  const Axis& Get(absl::string_view name) const;

  const std::shared_ptr<Communicator> job_;
  std::vector<Axis> axes_;
};

}  // namespace tessera
#endif  // COMM_MESH_MESH_H_
