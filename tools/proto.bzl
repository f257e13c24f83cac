"""proto_sources: C++ sources from .proto files, by Debian's protoc."""

ProtoSourcesInfo = provider(
    doc = "The .proto files of a target and of all that it imports.",
    fields = {"protos": "depset of files"},
)

def _impl(ctx):
    protos = depset(
        ctx.files.srcs,
        transitive = [dep[ProtoSourcesInfo].protos for dep in ctx.attr.deps],
    )
    headers = []
    sources = []

    # Where imports begin: Tessera may be a repository of another workspace.
    root = ctx.label.workspace_root
    for src in ctx.files.srcs:
        stem = src.basename[:-len(".proto")]
        header = ctx.actions.declare_file(stem + ".pb.h")
        source = ctx.actions.declare_file(stem + ".pb.cc")
        headers.append(header)
        sources.append(source)
        ctx.actions.run(
            executable = "/usr/bin/protoc",
            arguments = [
                "--cpp_out=%s/%s" % (ctx.bin_dir.path, root),
                "-I" + (root or "."),
                "-I/usr/include",
                src.path,
            ],
            inputs = protos,
            outputs = [header, source],
            mnemonic = "Protoc",
            progress_message = "Generating C++ from %s" % src.short_path,
        )
    return [
        DefaultInfo(files = depset(headers + sources)),
        OutputGroupInfo(cc = depset(sources), h = depset(headers)),
        ProtoSourcesInfo(protos = protos),
    ]

proto_sources = rule(
    implementation = _impl,
    attrs = {
        "deps": attr.label_list(providers = [ProtoSourcesInfo]),
        "srcs": attr.label_list(allow_files = [".proto"], mandatory = True),
    },
)
