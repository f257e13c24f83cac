"""cuda_objects: .cu files compiled by nvcc into an archive."""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")
load("@local_cuda//:defs.bzl", "NVCC", "NVCC_VERSION")

# Machine code for Hopper; older GPUs from Ampere on and newer ones compile the
# intermediate code when the program starts.
_FLAGS = [
    "-c",
    "-std=c++17",
    "-O2",
    "-DNDEBUG",
    "--expt-relaxed-constexpr",
    "--expt-extended-lambda",
    "-gencode=arch=compute_80,code=compute_80",
    "-gencode=arch=compute_90,code=sm_90",
    "-ccbin=/usr/bin/g++",
    "-Xcompiler=-fPIC,-Wall,-Wno-unknown-pragmas",
]

# nvcc calls g++'s tools by name. Its version is here to be part of what Bazel
# compares: the file itself is outside of the workspace. nvcc names its temporary
# files after its process id, which is the same in every sandbox: in a shared /tmp
# two compilations take each other's files. The working directory is the action's.
_ENV = {
    "NVCC_VERSION": NVCC_VERSION,
    "PATH": "/usr/bin:/bin",
    "TMPDIR": ".",
}

def _impl(ctx):
    deps = cc_common.merge_cc_infos(cc_infos = [d[CcInfo] for d in ctx.attr.deps])
    context = deps.compilation_context
    flags = list(_FLAGS)
    flags += ["-D" + d for d in context.defines.to_list()]
    flags += ["-I" + i for i in context.quote_includes.to_list()]
    flags += ["-I" + i for i in context.includes.to_list()]
    flags += ["-isystem=" + i for i in context.system_includes.to_list()]
    flags += ctx.attr.copts
    headers = [f for f in ctx.files.srcs if f.extension != "cu"] + ctx.files.hdrs
    objects = []
    for src in ctx.files.srcs:
        if src.extension != "cu":
            continue
        obj = ctx.actions.declare_file("_cuda/%s/%s.o" % (
            ctx.label.name,
            src.basename[:-len(".cu")],
        ))
        objects.append(obj)
        ctx.actions.run(
            executable = NVCC,
            arguments = flags + ["-o", obj.path, src.path],
            inputs = depset([src] + headers, transitive = [context.headers]),
            outputs = [obj],
            env = _ENV,
            mnemonic = "Nvcc",
            progress_message = "Compiling %s with nvcc" % src.short_path,
        )
    archive = ctx.actions.declare_file("lib%s.a" % ctx.label.name)
    ctx.actions.run(
        executable = find_cpp_toolchain(ctx).ar_executable,
        arguments = ["rcsD", archive.path] + [o.path for o in objects],
        inputs = objects,
        outputs = [archive],
        mnemonic = "CudaArchive",
    )
    return [DefaultInfo(files = depset([archive]))]

cuda_objects = rule(
    implementation = _impl,
    attrs = {
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdrs": attr.label_list(allow_files = [".h", ".cuh"]),
        "srcs": attr.label_list(allow_files = [".cu", ".cuh", ".h"]),
        "_cc_toolchain": attr.label(
            default = "@bazel_tools//tools/cpp:current_cc_toolchain",
        ),
    },
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
