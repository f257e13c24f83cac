"""@local_cuda: the CUDA toolkit, or the word that there is none.

CUDA is used where a toolkit of libtorch's CUDA (13) and a libtorch with CUDA
are both there. TESSERA_CUDA=0 makes a build for CPU only all the same;
TESSERA_CUDA=1 makes a missing toolkit an error. CUDA_HOME names a toolkit
elsewhere than in /usr/local/cuda.
"""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "headers",
    hdrs = {hdrs},
    includes = {includes},
)

cc_library(
    name = "nccl_headers",
    hdrs = {nccl_hdrs},
    includes = {nccl_includes},
)
"""

_DEFS = '''"""Whether there is CUDA, and where. Written by repository.bzl."""

HAS_CUDA = {has_cuda}
HAS_NCCL = {has_nccl}
NVCC = {nvcc}
NVCC_VERSION = {nvcc_version}
CUDA_LINKOPTS = {cuda_linkopts}
NCCL_LINKOPTS = {nccl_linkopts}
'''

def _toolkit(ctx):
    """Returns the toolkit's folder, or None and the reason."""
    wish = ctx.os.environ.get("TESSERA_CUDA", "")
    if wish == "0":
        return None, "TESSERA_CUDA=0"
    root = ctx.os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = ctx.path(root + "/bin/nvcc")
    if not nvcc.exists:
        return None, "there is no %s" % nvcc
    if "cuda_13." not in _nvcc_version(ctx, root):
        return None, "%s is not of CUDA 13, libtorch's" % nvcc
    if ctx.read(ctx.path(Label("@libtorch//:has_cuda.txt"))) != "1":
        return None, "libtorch is built without CUDA"
    return root, ""

def _nvcc_version(ctx, root):
    return ctx.execute([root + "/bin/nvcc", "--version"]).stdout.strip().split("\n")[-1]

def _nccl(ctx, root):
    """Returns the include and lib folders of NCCL, or None."""
    libtorch = ctx.path(Label("@libtorch//:has_cuda.txt")).dirname
    torch_include = str(ctx.path(str(libtorch) + "/include/torch").realpath)
    wheel = torch_include[:-len("/torch/include/torch")] + "/nvidia/nccl"

    # The wheel's is the one that libtorch was built with, so it comes first.
    if ctx.path(wheel + "/include/nccl.h").exists:
        return wheel + "/include", wheel + "/lib"
    if ctx.path(root + "/include/nccl.h").exists:
        return root + "/include", root + "/lib64"
    return None

def _impl(ctx):
    root, reason = _toolkit(ctx)
    if not root and ctx.os.environ.get("TESSERA_CUDA", "") == "1":
        fail("TESSERA_CUDA=1, but " + reason)
    nccl = _nccl(ctx, root) if root else None
    if root:
        # Without nccl.h, which may be another version than the one chosen.
        for entry in ctx.path(root + "/include").readdir():
            if not entry.basename.startswith("nccl"):
                ctx.symlink(entry, "include/" + entry.basename)
    if nccl:
        for entry in ctx.path(nccl[0]).readdir():
            if entry.basename.startswith("nccl"):
                ctx.symlink(entry, "nccl/" + entry.basename)
    ctx.file("BUILD", _BUILD.format(
        hdrs = ["include"] if root else [],
        includes = ["include"] if root else [],
        nccl_hdrs = ["nccl"] if nccl else [],
        nccl_includes = ["nccl"] if nccl else [],
    ), executable = False)
    lib = "%s/lib64" % root
    ctx.file("defs.bzl", _DEFS.format(
        has_cuda = bool(root),
        has_nccl = bool(nccl),
        nvcc = repr("%s/bin/nvcc" % root if root else ""),
        nvcc_version = repr(_nvcc_version(ctx, root) if root else ""),
        cuda_linkopts = ["-L" + lib, "-Wl,-rpath," + lib, "-lcudart"] if root else [],
        # By file: the wheel has no libnccl.so. Only who calls it loads it.
        nccl_linkopts = [
            "-Wl,-rpath," + nccl[1],
            "-Wl,--push-state,--as-needed",
            nccl[1] + "/libnccl.so.2",
            "-Wl,--pop-state",
        ] if nccl else [],
    ), executable = False)

cuda_repository = repository_rule(
    implementation = _impl,
    local = True,
    environ = [
        "CUDA_HOME",
        "TESSERA_CUDA",
        "TESSERA_LIBTORCH",
        "TESSERA_LIBTORCH_FOUND",
    ],
)
