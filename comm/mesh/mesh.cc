#include "comm/mesh/mesh.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<std::shared_ptr<Mesh>> Mesh::Create(
    std::shared_ptr<Communicator> job, std::vector<MeshAxis> axes) {
  const std::shared_ptr<Mesh> mesh(new Mesh(std::move(job)));
  const std::string all =
      absl::StrJoin(axes, " x ", [](std::string* text, const MeshAxis& axis) {
        absl::StrAppend(text, axis.name, " ", axis.size);
      });
  const int world_size = mesh->job_->world_size();
  int64_t ranks = 1;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if (axis->size < 1 || world_size % (ranks * axis->size) != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "mesh ", all, ": axis '", axis->name, "' has size ", axis->size,
          ", expected a divisor of ", world_size / ranks, " (", world_size,
          " ranks over the sizes of the axes after it)"));
    }
    const int64_t stride = ranks;
    ranks *= axis->size;
    TESSERA_RETURN_IF_ERROR(mesh->Add(std::move(*axis), stride));
  }
  if (ranks == world_size) return mesh;
  return absl::InvalidArgumentError(
      absl::StrCat("mesh ", all, ": the axes have ", ranks,
                   " ranks, expected all of the job's ", world_size));
}

absl::Status Mesh::Add(MeshAxis axis, int64_t stride) {
  if (axis.name.empty() || Find(axis.name).ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "mesh: axis '", axis.name, "': expected a name of its own"));
  }
  if (axis.what.empty()) axis.what = axis.name;
  axes_.push_back({std::move(axis), stride, nullptr});
  return absl::OkStatus();
}

absl::Status Mesh::Join(absl::string_view name, absl::string_view first,
                        absl::string_view last) {
  TESSERA_RETURN_IF_ERROR(Find(first).status());
  TESSERA_RETURN_IF_ERROR(Find(last).status());
  const Axis &outer = Get(first), &inner = Get(last);
  if (outer.stride < inner.stride * inner.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("mesh: '", name, "' joins '", first, "' and '", last,
                     "', expected an axis and one inside of it"));
  }
  const int64_t ranks = outer.stride * outer.size / inner.stride;
  return Add({std::string(name), static_cast<int>(ranks), ""}, inner.stride);
}

absl::StatusOr<size_t> Mesh::Find(absl::string_view name) const {
  std::vector<std::string> names;
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (axes_[i].name == name) return i;
    names.push_back(axes_[i].name);
  }
  return absl::InvalidArgumentError(absl::StrCat("mesh: there is no axis '",
                                                 name, "', expected one of ",
                                                 absl::StrJoin(names, ", ")));
}

const Mesh::Axis& Mesh::Get(absl::string_view name) const {
  const absl::StatusOr<size_t> found = Find(name);
  TESSERA_CHECK(found.ok()) << found.status().message();
  return axes_[*found];
}

int Mesh::coordinate(absl::string_view axis) const {
  const Axis& of = Get(axis);
  return static_cast<int>(job_->rank() / of.stride % of.size);
}

std::vector<int> Mesh::ranks(absl::string_view axis) const {
  const Axis& of = Get(axis);
  int64_t rank = job_->rank() - coordinate(axis) * of.stride;
  std::vector<int> ranks;
  for (int i = 0; i < of.size; ++i, rank += of.stride) {
    ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

// Groups of an axis are numbered by their ranks' places on all others.
absl::Status Mesh::MakeGroup(absl::string_view axis) {
  TESSERA_ASSIGN_OR_RETURN(const size_t found, Find(axis));
  Axis& of = axes_[found];
  if (of.group != nullptr) return absl::OkStatus();
  if (of.size == job_->world_size()) {
    of.group = job_;
    return absl::OkStatus();
  }
  const int64_t outer = job_->rank() / (of.stride * of.size);
  const int64_t inner = job_->rank() % of.stride;
  TESSERA_ASSIGN_OR_RETURN(
      of.group, job_->Split(static_cast<int>(outer * of.stride + inner),
                            CommTag{of.what}));
  return absl::OkStatus();
}

}  // namespace tessera
