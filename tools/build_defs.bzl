"""The macros that all BUILD files use instead of Bazel's cc_* rules.

They add our warnings and a precompiled header: see "Note [What is precompiled]"
below. A file must not depend on flags that its precompiled header was made
without, such as -mavx2 in copts.
"""

load("//third_party/cuda:defs.bzl", "HAS_CUDA")
load("//tools:cuda.bzl", "cuda_objects")
load("//tools:joined.bzl", "joined_sources")
load("//tools:pch.bzl", "pch_copts")
load("//tools:proto.bzl", "proto_sources")

_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wimplicit-fallthrough",
    "-Wnon-virtual-dtor",
    "-Woverloaded-virtual",
    "-Wshadow-uncaptured-local",
    "-Wthread-safety",
    # `Options options = {}` and `{.first = x}` are fine: members have defaults.
    "-Wno-missing-field-initializers",
    # absl's and torch's interfaces name parameters that one override ignores.
    "-Wno-unused-parameter",
]

# Note [What is precompiled]
# Libraries and programs have absl and what generated protobuf code includes
# precompiled, which saves 0.6 s and 0.3 s a file; with
# torch_pch = True also libtorch, which costs 10 s in every file that includes it,
# and 0.4 s precompiled.
#
# Tests are most of what a clean build compiles, and their time goes into reading
# headers and optimising what runs once. So they have precompiled what most of them
# include: gtest and absl, with torch_pch = True also libtorch, and the engine
# where they train on ranks. And they are not optimised (TEST_COPTS), unless they
# say optimized = True: a test of 500 lines takes 3.5 s of a processor instead of
# 10. The price: where a test and a library both have a copy of an inline function,
# the linker takes one for both, which may be the test's slow one.
_ABSL_PCH = "//third_party/absl:absl_pch"
_TORCH_PCH = "//third_party/libtorch:torch_pch"
_TEST_PCH = "//testing/pch:test_pch"
_TORCH_TEST_PCH = "//testing/pch:torch_test_pch"
_RANK_TEST_PCH = "//tests/pch:rank_test_pch"
TEST_COPTS = [
    "-O0",
    "-U_FORTIFY_SOURCE",
]

# What tests of ranks use, and those of them that train.
_RANK_TEST_DEPS = [
    "//base",
    "//base:status_matchers",
    "//comm/world",
    "//tests/support:rank_pool",
    "//tests/support:test_util",
    "//third_party/absl:status",
    "//third_party/absl:statusor",
    "//third_party/absl:str_format",
    "//third_party/absl:strings",
    "//third_party/absl:synchronization",
    "//third_party/absl:time",
    "//third_party/gtest",
    "//third_party/gtest:gmock",
    "//third_party/libtorch:torch",
]
_ENGINE_TEST_DEPS = [
    "//engine",
    "//tests/models",
    "//tests/support",
    "//tests/support:training",
]

# A test with both of these in its deps gets the rank tests' header, which is made
# of them.
_RANK_TESTS_NEED = ["//engine", "//tests/support:rank_pool"]

def _test_pch(torch_pch, deps):
    if not torch_pch:
        return _TEST_PCH
    for dep in _RANK_TESTS_NEED:
        if dep not in deps:
            return _TORCH_TEST_PCH
    return _RANK_TEST_PCH

def _cc(rule, torch_pch, optimized, copts, deps, kwargs, absl_pch = True):
    if not optimized:
        pch, more = _test_pch(torch_pch, deps), TEST_COPTS
    else:
        pch, more = _TORCH_PCH if torch_pch else _ABSL_PCH, []
        if not torch_pch and (copts or not absl_pch):
            pch = None  # copts may be such that it does not fit
    srcs = kwargs.pop("srcs", [])
    rule(
        srcs = srcs if not kwargs.pop("joined", True) else joined_sources(
            kwargs["name"],
            srcs,
            testonly = rule == native.cc_test or kwargs.get("testonly", False),
            own_namespaces = rule == native.cc_test,
        ),
        copts = _WARNINGS + more + (pch_copts(pch) if pch else []) + copts,
        deps = deps + ([pch] if pch else []),
        **kwargs
    )

def tessera_cc_library(
        name,
        torch_pch = False,
        absl_pch = True,
        copts = [],
        deps = [],
        **kwargs):
    """cc_library with our warnings. All its other attributes may be given.

    absl_pch = False: its files may not have read absl. joined = False: each is
    compiled by itself (tools/joined.bzl).
    """
    kwargs["name"] = name
    _cc(native.cc_library, torch_pch, True, copts, deps, kwargs, absl_pch)

def tessera_cc_binary(name, torch_pch = False, copts = [], deps = [], **kwargs):
    """cc_binary with our warnings. All its other attributes may be given.

    A program has descriptors 0, 1 and 2, whoever starts it.
    """
    kwargs["name"] = name
    if not kwargs.get("linkshared", False):
        deps = deps + ["//base/system:process_defaults"]
    _cc(native.cc_binary, torch_pch, True, copts, deps, kwargs)

def tessera_cc_test(
        name,
        torch_pch = False,
        optimized = False,
        size = "small",
        copts = [],
        deps = [],
        **kwargs):
    """cc_test with our warnings; add //third_party/gtest:gtest_main to deps.

    Tests that need a GPU carry tags = ["gpu"], slow ones tags = ["slow"] (see
    .bazelrc for both), those that must run alone "cpu:2". Tests that
    AddressSanitizer does not fit carry "noasan" and why; those that
    ThreadSanitizer does, "tsan".
    """
    kwargs["name"] = name
    kwargs["size"] = size
    _cc(native.cc_test, torch_pch, optimized, copts, deps, kwargs)

def _run_again_test_impl(ctx):
    executable = ctx.actions.declare_file(ctx.label.name)
    ctx.actions.symlink(
        output = executable,
        target_file = ctx.executable.binary,
        is_executable = True,
    )
    return [
        DefaultInfo(
            executable = executable,
            runfiles = ctx.attr.binary[DefaultInfo].default_runfiles,
        ),
        testing.TestEnvironment(ctx.attr.env),
    ]

_OF_A_RUN = ["args", "flaky", "local", "shard_count", "size", "timeout"]

# Another test's program with other arguments, tags or with `env` in its
# environment, not built once more.
tessera_run_again_test = rule(
    implementation = _run_again_test_impl,
    attrs = {
        "binary": attr.label(
            mandatory = True,
            executable = True,
            cfg = "target",
        ),
        "env": attr.string_dict(),
    },
    test = True,
)

def tessera_rank_test(
        name,
        backends = [],
        args_over = {},
        slow = None,
        cpus = 1,
        env = {},
        engine = True,
        own_main = False,
        deps = [],
        **kwargs):
    """tessera_cc_test of ranks (tests/support/rank_pool.h), over shm.

    It uses libtorch, and has main() and its usual deps from here.

    Args:
      name: the target over shm.
      backends: others over which the same program runs, where what is tested
        depends on them: "gloo" makes the target `name`_gloo.
      args_over: by backend, the program's arguments, for a part of the cases or
        fewer rounds; all of it is then `name`_gloo_slow. `args` where there are
        none.
      slow: attributes (args, env) of the same program's run with the tag "slow",
        `name`_slow: what takes minutes, of which the others are a part.
      cpus: 3 where it is the subject how soon something happens: with two
        processors no other test runs beside it (.bazelrc). Ranks mostly wait for
        each other.
      env: as of tessera_cc_test.
      engine: whether its ranks train; otherwise it is not compiled anew with
        each change of the engine.
      own_main: whether its sources have a main() that is not
        tests/support/rank_main.cc.
      deps: what it uses besides _RANK_TEST_DEPS and _ENGINE_TEST_DEPS.
      **kwargs: as of tessera_cc_test.
    """
    tags = kwargs.pop("tags", []) + ["cpu:%d" % cpus]
    kwargs.setdefault("size", "medium")
    usual = _RANK_TEST_DEPS + (_ENGINE_TEST_DEPS if engine else [])
    deps = deps + [dep for dep in usual if dep not in deps] + ([
        "//third_party/gtest:run_and_exit",
    ] if own_main else [
        "//tests/support:rank_main",
    ])
    tessera_cc_test(
        name = name,
        torch_pch = True,
        env = env,
        tags = tags,
        deps = deps,
        **kwargs
    )
    if slow:
        tessera_run_again_test(
            name = name + "_slow",
            size = "large",
            binary = name,
            tags = tags + ["slow"],
            **slow
        )
    for backend in backends:
        own = {key: kwargs[key] for key in _OF_A_RUN if key in kwargs}
        runs = [("", own, [])]
        if backend in args_over:
            runs = [
                ("", dict(own, args = args_over[backend]), []),
                ("_slow", dict(own, size = "large"), ["slow"]),
            ]
        for suffix, attributes, more_tags in runs:
            tessera_run_again_test(
                name = name + "_" + backend + suffix,
                binary = name,
                env = dict(env, TESSERA_TEST_BACKEND = backend),
                tags = tags + more_tags,
                **attributes
            )

def tessera_proto_library(name, srcs, deps = [], visibility = None, testonly = False):
    """C++ code for .proto files: include "folder/file.pb.h", depend on `name`.

    Args:
      name: the C++ library's name.
      srcs: .proto files of this package. They import each other, those of
        `deps` and well-known types by their path from the workspace's root.
      deps: other tessera_proto_library targets.
      visibility: as usual.
      testonly: as usual.
    """
    proto_sources(
        name = name + "_srcs",
        srcs = srcs,
        deps = [dep + "_srcs" for dep in deps],
        testonly = testonly,
        visibility = visibility,
    )
    native.filegroup(
        name = name + "_cc",
        srcs = [name + "_srcs"],
        output_group = "cc",
        testonly = testonly,
        visibility = ["//visibility:private"],
    )
    native.filegroup(
        name = name + "_h",
        srcs = [name + "_srcs"],
        output_group = "h",
        testonly = testonly,
        visibility = ["//visibility:private"],
    )
    native.cc_library(
        name = name,
        srcs = [name + "_cc"],
        hdrs = [name + "_h"],
        testonly = testonly,
        visibility = visibility,
        deps = deps + ["//third_party/protobuf"],
    )

def tessera_cuda_library(
        name,
        srcs,
        hdrs = [],
        deps = [],
        copts = [],
        visibility = None,
        testonly = False,
        tags = []):
    """A library of .cu files, compiled by nvcc; without CUDA, its headers only.

    Callers must not call into it unless TESSERA_HAS_CUDA is defined.

    Args:
      name: the library's name.
      srcs: .cu files, and headers that only they include.
      hdrs: headers for dependents: plain C++, that any compiler reads.
      deps: cc_library targets; //third_party/cuda:cudart is added.
      copts: more flags for nvcc.
      visibility: as usual.
      testonly: as usual.
      tags: as usual.
    """
    deps = deps + ["//third_party/cuda:cudart"]
    objects = []
    if HAS_CUDA:
        cuda_objects(
            name = name + "_objects",
            srcs = srcs,
            hdrs = hdrs,
            deps = deps,
            copts = copts,
            testonly = testonly,
            tags = tags,
            visibility = ["//visibility:private"],
        )
        objects = [name + "_objects"]
    native.cc_library(
        name = name,
        srcs = objects,
        hdrs = hdrs,
        deps = deps,
        testonly = testonly,
        tags = tags,
        visibility = visibility,
        linkstatic = True,
    )
