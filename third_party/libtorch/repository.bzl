"""@libtorch: headers and link options of the libtorch that was found.

The headers are linked in folder by folder, because one of them must stay out:
google/, an old protobuf that would shadow Debian's.
"""

_HIDDEN = ["google", "pybind11"]

_BUILD = """
package(default_visibility = ["//visibility:public"])

exports_files(["has_cuda.txt"])

# The folder as a whole is the input: a glob of its 9000 files makes every
# action 8 times as slow.
cc_library(
    name = "headers",
    hdrs = ["include"],
    includes = [
        "include",
        "include/torch/csrc/api/include",
    ],
)
"""

_DEFS = '''"""Where libtorch is and how to link it. Written by repository.bzl."""

LIBTORCH = {root}

# Linked by the real folder, so that libtorch's own run path (../../nvidia/...)
# and its bundled libgomp work; "no-as-needed", because kernels register
# themselves and no symbol of ours asks for them. CUDA's library is loaded where
# there is a driver: base/stream/cuda_library.h.
LIBTORCH_LINKOPTS = [
    "-L{lib}",
    "-Wl,-rpath,{lib}",
    "-Wl,--disable-new-dtags",
    "-Wl,--push-state,--no-as-needed",
    "-ltorch_cpu",
    "-lc10",
    "-Wl,--pop-state",
]
LIBTORCH_CUDA_LINKOPTS = [
    "-Wl,--push-state,--as-needed",
    "-lc10_cuda",
    "-Wl,--pop-state",
]
'''

def _find(ctx):
    # What tools/setup found stands until it is run again, unless this run names
    # another one.
    env = ctx.os.environ
    found = env.get("TESSERA_LIBTORCH_FOUND", "")
    if not env.get("TESSERA_LIBTORCH") and found:
        if ctx.path(found + "/lib/libtorch_cpu.so").exists:
            return found
    result = ctx.execute([ctx.path(Label("//tools:find_libtorch"))])
    if result.return_code != 0:
        fail("libtorch 2.11.0 was not found; run tools/setup. %s" %
             result.stderr.strip())
    return result.stdout.strip()

def _impl(ctx):
    root = _find(ctx)
    for entry in ctx.path(root + "/include").readdir():
        if entry.basename not in _HIDDEN:
            ctx.symlink(entry, "include/" + entry.basename)
    lib = root + "/lib"
    has_cuda = ctx.path(lib + "/libtorch_cuda.so").exists
    ctx.file("has_cuda.txt", "1" if has_cuda else "0", executable = False)
    ctx.file("BUILD", _BUILD, executable = False)
    ctx.file("defs.bzl", _DEFS.format(root = repr(root), lib = lib), executable = False)

libtorch_repository = repository_rule(
    implementation = _impl,
    local = True,
    environ = [
        "TESSERA_LIBTORCH",
        "TESSERA_LIBTORCH_FOUND",
        "XDG_CACHE_HOME",
    ],
)
