"""Libraries of Debian's packages as cc_library targets, by pkg-config.

Their headers are in /usr/include, which Bazel treats as part of the compiler,
so only defines and link options are needed.
"""

_TARGET = """
cc_library(
    name = {name},
    defines = {defines},
    linkopts = {linkopts},
)
"""

def _pkg_config(ctx, *args):
    tool = ctx.which("pkg-config")
    if not tool:
        fail("pkg-config is not installed; run tools/setup")
    result = ctx.execute([tool] + list(args))
    if result.return_code != 0:
        fail("%s is not installed; run tools/setup (pkg-config: %s)" %
             (args[-1], result.stderr.strip().split("\n")[0]))
    return result.stdout.strip()

def _impl(ctx):
    build = ["package(default_visibility = [\"//visibility:public\"])\n"]
    for name, package in sorted(ctx.attr.packages.items()):
        _pkg_config(
            ctx,
            "--print-errors",
            "--atleast-version=" + ctx.attr.min_version,
            package,
        )
        flags = _pkg_config(ctx, "--cflags", "--libs", package).split(" ")
        defines = [f[2:] for f in flags if f.startswith("-D")]
        libs = [f for f in flags if f.startswith("-l") or f.startswith("-Wl,")]

        # Of abseil's dozens of libraries a program loads those it uses.
        libs = ["-Wl,--push-state,--as-needed"] + libs + ["-Wl,--pop-state"]
        build.append(_TARGET.format(
            name = repr(name),
            defines = repr(defines),
            linkopts = repr(libs),
        ))
    ctx.file("BUILD", "".join(build), executable = False)

pkg_config_repository = repository_rule(
    implementation = _impl,
    attrs = {
        "min_version": attr.string(mandatory = True),
        "packages": attr.string_dict(doc = "target name to .pc name"),
    },
    local = True,
    environ = ["PKG_CONFIG_PATH"],
)
