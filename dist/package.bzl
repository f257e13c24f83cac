"""What a shared library of many cc_library targets, and its users, need."""

def _cc_contents_impl(ctx):
    info = cc_common.merge_cc_infos(cc_infos = [dep[CcInfo] for dep in ctx.attr.deps])
    objects, flags = [], []
    for input in info.linking_context.linker_inputs.to_list():
        flags += input.user_link_flags
        for library in input.libraries:
            of_library = library.pic_objects or library.objects
            archive = library.pic_static_library or library.static_library
            if of_library:
                objects += of_library
            elif archive:  # the name says: with all of it
                whole = ctx.actions.declare_file(archive.basename[:-len(".a")] + ".lo")
                ctx.actions.symlink(output = whole, target_file = archive)
                objects.append(whole)
    headers = [
        header
        for header in info.compilation_context.headers.to_list()
        if header.extension == "h" and not header.short_path.startswith("../")
    ]
    link_flags = cc_common.create_linking_context(
        linker_inputs = depset([cc_common.create_linker_input(
            owner = ctx.label,
            user_link_flags = depset(flags),
        )]),
    )
    return [
        CcInfo(linking_context = link_flags),
        OutputGroupInfo(headers = depset(headers), objects = depset(objects)),
    ]

cc_contents = rule(
    implementation = _cc_contents_impl,
    doc = "All objects and headers of `deps` and of what they depend on, in the " +
          "output groups `objects` and `headers`. As a dependency it is their " +
          "link options alone.",
    attrs = {"deps": attr.label_list(providers = [CcInfo], mandatory = True)},
)
