"""tessera_dependencies: the repositories that Tessera needs.

Everything is on the machine already: Debian's packages, a libtorch and, where
there is one, a CUDA toolkit. tools/setup installs what is missing; Bazel itself
downloads nothing. In the WORKSPACE of a project of one's own:

    local_repository(name = "tessera", path = "../tessera")
    load("@tessera//tools:dependencies.bzl", "tessera_dependencies")
    tessera_dependencies()
"""

load("//third_party:pkg_config.bzl", "pkg_config_repository")
load("//third_party/absl:targets.bzl", "ABSL_TARGETS")
load("//third_party/cuda:repository.bzl", "cuda_repository")
load("//third_party/libtorch:repository.bzl", "libtorch_repository")

def _bundled_impl(ctx):
    third_party = ctx.path(Label("//third_party:BUILD")).dirname
    for entry in third_party.get_child("rules").get_child(ctx.name).readdir():
        ctx.symlink(entry, entry.basename)

# third_party/rules/NAME as a repository. (Paths of a local_repository would be
# those of the workspace that uses Tessera.)
_bundled_repository = repository_rule(implementation = _bundled_impl, local = True)

# The versions are Debian 12's; another one is refused by name.
_PACKAGES = {
    "absl": ("20220623", {name: "absl_" + name for name in ABSL_TARGETS}),
    "benchmark": ("1.7.1", {"benchmark": "benchmark"}),
    "gtest": ("1.12.1", {
        "gmock": "gmock",
        "gtest": "gtest",
        "gtest_main": "gtest_main",
    }),
    "isal": ("2.30.0", {"isal": "libisal"}),
    "protobuf": ("3.21.12", {"protobuf": "protobuf"}),
    "sentencepiece": ("0.1.97", {"sentencepiece": "sentencepiece"}),
    "sodium": ("1.0.18", {"sodium": "libsodium"}),
    "uring": ("2.3", {"uring": "liburing"}),
    "zlib": ("1.2.13", {"zlib": "zlib"}),
}

def _once(rule, name, **kwargs):
    if name not in native.existing_rules():
        rule(name = name, **kwargs)

def tessera_dependencies():
    """Defines them all, but for those that the workspace has defined before."""

    # Bazel 4 fetches these five from the network when nobody defines them.
    for name in ["rules_cc", "rules_java", "rules_proto", "remote_coverage_tools"]:
        _once(_bundled_repository, name)
    _once(native.local_repository, "platforms", path = "/usr/share/bazel/platforms")
    _once(libtorch_repository, "libtorch")
    _once(cuda_repository, "local_cuda")
    for name, (min_version, packages) in _PACKAGES.items():
        _once(
            pkg_config_repository,
            name,
            min_version = min_version,
            packages = packages,
        )
