#include "comm/mesh/mesh.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status.h"

namespace tessera {

absl::StatusOr<std::shared_ptr<Mesh>> Mesh::Create(
    std::shared_ptr<Communicator> job, std::vector<MeshAxis> axes) {
  const std::shared_ptr<Mesh> mesh(new Mesh(std::move(job)));
  TESSERA_RETURN_IF_ERROR(mesh->AddAll("the job", mesh->job_->world_size(),
                                       /*stride=*/1, std::move(axes)));
  return mesh;
}

absl::Status Mesh::Divide(absl::string_view axis, std::vector<MeshAxis> parts) {
  TESSERA_RETURN_IF_ERROR(Find(axis).status());
  const Axis& of = Get(axis);
  return AddAll(absl::StrCat("axis '", axis, "'"), of.size, of.stride,
                std::move(parts));
}

// `of`, in words, has `size` ranks, each `stride` after the one before.
absl::Status Mesh::AddAll(const std::string& of, int64_t size, int64_t stride,
                          std::vector<MeshAxis> axes) {
  const std::string all =
      absl::StrJoin(axes, " x ", [](std::string* text, const MeshAxis& axis) {
        absl::StrAppend(text, axis.name, " ", axis.size);
      });
  int64_t ranks = 1;
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    if (axis->size < 1 || size % (ranks * axis->size) != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "mesh ", all, ": axis '", axis->name, "' has size ", axis->size,
          ", expected a divisor of ", size / ranks, " (", size,
          " ranks over the sizes of the axes after it)"));
    }
    if (axis->name.empty() || Find(axis->name).ok()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "mesh: axis '", axis->name, "': expected a name of its own"));
    }
    if (axis->what.empty()) axis->what = axis->name;
    const int64_t each = stride * ranks;
    ranks *= axis->size;
    axes_.push_back({std::move(*axis), each, nullptr});
  }
  if (ranks == size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("mesh ", all, ": the axes have ", ranks,
                   " ranks, expected all ", size, " of ", of));
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
  if (of.size == job_->world_size()) of.group = job_;
  for (const Axis& other : axes_) {  // that is all of a divided one
    if (other.stride != of.stride || other.size != of.size) continue;
    if (other.group != nullptr) of.group = other.group;
  }
  if (of.group != nullptr) return absl::OkStatus();
  const int64_t outer = job_->rank() / (of.stride * of.size);
  const int64_t inner = job_->rank() % of.stride;
  TESSERA_ASSIGN_OR_RETURN(
      of.group, job_->Split(static_cast<int>(outer * of.stride + inner),
                            CommTag{of.what}));
  return absl::OkStatus();
}

}  // namespace tessera
