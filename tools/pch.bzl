"""cc_pch: a precompiled header, for clang.

<torch/torch.h> costs 10 s in every file that includes it, 0.4 s with this. See
"Note [Precompiled header]" below for why each flag is needed.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

# Note [Precompiled header]
# A PCH must be the same bytes wherever it is made, and what it was made from
# must show in the dependency files (.d) of the files that use it: Bazel believes
# these, and would not compile again after an edit of a header that they hide.
# - The flags are taken from the C++ toolchain, as cc_library's are: clang
#   refuses a PCH made with others.
# - Actions run in sandboxes with names of their own, and clang writes absolute
#   paths into a PCH. So its folder is called /proc/self/cwd when it is made, and
#   the options call it a "sysroot" which the PCH may be moved out of
#   (-relocatable-pch: paths below it are kept relative). Its user says that the
#   sysroot is ".", and the headers' paths in the .d file are relative, as Bazel
#   wants them. At clang's cc1 level (-Xclang) -isysroot has no other effect: the
#   driver's own search paths are exempt from it.
# - -fno-pch-timestamp: clang would compare the headers' times, which differ from
#   machine to machine, and not their sizes alone.
# - -fdepfile-entry, given by the user of the PCH: the PCH itself is in its .d.
# - -fpch-instantiate-templates takes work that every user would do again into
#   the PCH: 1.8 s a file instead of 4.1 s. Virtual functions of templates are left
#   out of that, which third_party/libtorch/torch_pch.h corrects: 0.4 s.
_FLAGS = [
    "-xc++-header",
    "-working-directory=/proc/self/cwd",
    "-fpch-instantiate-templates",
    "-Xclang",
    "-relocatable-pch",
    "-Xclang",
    "-isysroot",
    "-Xclang",
    "/proc/self/cwd",
    "-Xclang",
    "-fno-pch-timestamp",
]

def pch_copts(label):
    """Returns the copts of a file that is compiled with the cc_pch `label`."""
    label = Label(label)
    folder = "/".join([part for part in [label.workspace_root, label.package] if part])
    path = "$(BINDIR)/%s/%s.pch" % (folder, label.name)
    return [
        "-include-pch",
        path,
        "-Xclang",
        "-isysroot",
        "-Xclang",
        ".",
        "-Xclang",
        "-fdepfile-entry=" + path,
    ]

def _cc_pch_impl(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    deps = cc_common.merge_cc_infos(
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    )
    context = deps.compilation_context
    hdr = ctx.file.hdr
    pch = ctx.actions.declare_file(ctx.label.name + ".pch")
    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = toolchain,
        source_file = hdr.path,
        output_file = pch.path,
        user_compile_flags = (
            ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts
        ),
        include_directories = context.includes,
        quote_include_directories = context.quote_includes,
        system_include_directories = context.system_includes,
        preprocessor_defines = context.defines,
        use_pic = True,
    )
    flags = cc_common.get_memory_inefficient_command_line(
        feature_configuration = features,
        action_name = "c++-compile",
        variables = variables,
    )
    ctx.actions.run(
        executable = cc_common.get_tool_for_action(
            feature_configuration = features,
            action_name = "c++-compile",
        ),
        arguments = _FLAGS + flags,
        env = cc_common.get_environment_variables(
            feature_configuration = features,
            action_name = "c++-compile",
            variables = variables,
        ),
        inputs = depset([hdr], transitive = [context.headers, toolchain.all_files]),
        outputs = [pch],
        mnemonic = "CppPch",
        progress_message = "Precompiling %s" % hdr.short_path,
    )
    return [
        DefaultInfo(files = depset([pch])),
        cc_common.merge_cc_infos(
            direct_cc_infos = [
                CcInfo(compilation_context = cc_common.create_compilation_context(
                    headers = depset([pch, hdr]),
                )),
            ],
            cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
        ),
    ]

cc_pch = rule(
    implementation = _cc_pch_impl,
    attrs = {
        # Those of the files that use it, where they have more than others.
        "copts": attr.string_list(),
        "deps": attr.label_list(providers = [CcInfo]),
        "hdr": attr.label(allow_single_file = [".h"], mandatory = True),
        "_cc_toolchain": attr.label(
            default = "@bazel_tools//tools/cpp:current_cc_toolchain",
        ),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
