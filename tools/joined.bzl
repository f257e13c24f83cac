"""joined_sources: several source files as one, which compiles several times faster."""

# Note [Joined sources]
# Of the 2.5 s that a file of ours takes to compile, 2 go into what others of its
# folder do again: reading the precompiled header, and instantiating the same
# templates of libtorch, absl and gtest. So the files of a target are compiled as
# one: eleven of sharding/flat take 6 s instead of 25, 23 tests of checkpoints 9
# instead of 49. What it asks for:
# - A folder's files do not define the same name twice, in unnamed namespaces
#   neither, and undefine their macros. Tests may: each that is within an unnamed
#   namespace as a whole gets one of its own around that.
# - A file includes what it uses, although it would compile without:
#   `bazel build --config=apart //...` compiles each by itself.
# - A target is a folder's, not a header's: tools/room_costs.txt has limits.
_MOST_FILES = 16

def _joined_sources_impl(ctx):
    arguments = ctx.actions.args()
    arguments.add(ctx.file._joiner)
    arguments.add(ctx.outputs.out)
    arguments.add("--own-namespaces" if ctx.attr.own_namespaces else "--as-they-are")
    for src in ctx.files.srcs:
        arguments.add(src.path + "=" + src.short_path)
    ctx.actions.run(
        executable = "/usr/bin/python3",
        arguments = [arguments],
        inputs = ctx.files.srcs + [ctx.file._joiner],
        outputs = [ctx.outputs.out],
        mnemonic = "JoinSources",
    )

_joined_sources = rule(
    implementation = _joined_sources_impl,
    attrs = {
        "srcs": attr.label_list(allow_files = True, mandatory = True),
        "out": attr.output(mandatory = True),
        "own_namespaces": attr.bool(),
        "_joiner": attr.label(
            default = "//tools:join_sources.py",
            allow_single_file = True,
        ),
    },
)

def joined_sources(name, srcs, testonly, own_namespaces):
    """Returns what a target has as srcs in place of `srcs`.

    Args:
      name: the target's name.
      srcs: its srcs. What is no list of .cc files and headers stays as it is.
      testonly: as of the target.
      own_namespaces: whether the unnamed namespaces of the files are apart.
    """
    if type(srcs) != type([]):
        return srcs
    files = [src for src in srcs if src.endswith(".cc")]
    if len(files) < 2:
        return srcs
    parts = (len(files) + _MOST_FILES - 1) // _MOST_FILES
    joined = []
    for part in range(parts):
        out = "%s_joined%d.cc" % (name, part)
        _joined_sources(
            name = "%s_joined%d" % (name, part),
            srcs = files[part * len(files) // parts:(part + 1) * len(files) // parts],
            out = out,
            own_namespaces = own_namespaces,
            testonly = testonly,
            visibility = ["//visibility:private"],
        )
        joined.append(out)
    others = [src for src in srcs if not src.endswith(".cc")]
    return select({
        "//tools:apart": srcs,
        "//conditions:default": others + joined,
    })
