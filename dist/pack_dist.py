#!/usr/bin/python3
"""Packs the library with its headers (docs/install.md).

usage: pack_dist.py OUT.tar.gz VERSION.h PATH_IN_THE_ARCHIVE=FILE ... -- HEADER ...

Our headers, those that the public ones include, go to include/tessera. They and
their guards get the prefix there ("engine/engine.h" becomes
"tessera/engine/engine.h", ENGINE_ENGINE_H_ becomes TESSERA_ENGINE_ENGINE_H_), so
that a program may have headers of the same names. Those of abseil and protobuf on
this system go to include/tessera/third_party as they are; a header of ours checks
that no other abseil comes before them. Programs and libraries are treated
as bundle/pack.py does it: the system's libraries that they need lie beside ours
in lib/, which have no place in a CMake package of their own on Debian. What is
linked to users' programs is lib/ alone: programs in libexec/tessera/bin have
their libraries in libexec/tessera/lib. Run paths are DT_RPATH: no script sets
LD_LIBRARY_PATH here, and DT_RUNPATH would not serve what libraries need.
"""
import gzip
import os
import re
import sys
import tarfile
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(__file__), '..', 'bundle'))
sys.dont_write_bytecode = True

import pack  # pylint: disable=wrong-import-position

PUBLIC = [
    'absl/flags/flag.h',  # for flags that Start reads
    'tessera/extra.h', 'tessera/tessera.h']
PREFIX = 'tessera/'
APART = 'libexec/tessera/'
SYSTEM = '/usr/include'
THIRD_PARTY = ('absl/', 'google/protobuf/')
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
OURS = re.compile(r'^(\s*#\s*include\s*)["<]([^">]+)[">]', re.MULTILINE)
GUARD = re.compile(r'^#ifndef +(\w+)\n#define +\1$', re.MULTILINE)
# What every header of ours reaches through base/status.h.
ABSEIL, FIRST = 'absl/base/options.h', 'base/status.h'
NAMESPACE = re.compile(r'^#define ABSL_OPTION_INLINE_NAMESPACE_NAME (\w+)$', re.MULTILINE)
CHECK = '''
// Tessera's library is for the abseil whose headers are in its archive.
#define TESSERA_TEXT_(word) #word
#define TESSERA_TEXT(word) TESSERA_TEXT_(word)
static_assert(
    ::absl::string_view(TESSERA_TEXT(ABSL_OPTION_INLINE_NAMESPACE_NAME)) == "%s",
    "another abseil's headers come before those of Tessera's archive "
    "(include/tessera/third_party): put its include folder behind Tessera's, or "
    "use it in other source files");
#undef TESSERA_TEXT
#undef TESSERA_TEXT_
'''
GENERATED = re.compile(r'^bazel-out/[^/]+/bin/(?:[\w/]*/_virtual_includes/[^/]+/)?')
VERSION = re.compile(r'kTesseraVersion\[\] = "([0-9.]+)"')


def read(path):
    with open(path, 'rb') as file:
        return file.read()


def path_of(name, ours):
    if name in ours:
        return ours[name]
    path = os.path.join(SYSTEM, name)
    return path if name.startswith(THIRD_PARTY) and os.path.exists(path) else None


def public_headers(ours):
    """Returns {name: file} of PUBLIC and all that these include."""
    found, waiting = {}, list(PUBLIC)
    while waiting:
        name = waiting.pop()
        path = path_of(name, ours)
        if name in found or path is None:  # libtorch's, the compiler's
            continue
        found[name] = path
        for included in INCLUDE.findall(read(path).decode()):
            beside = os.path.join(os.path.dirname(name), included)
            waiting += [included, os.path.normpath(beside)]
    missing = [name for name in PUBLIC if name not in found]
    assert not missing, 'no header of the targets: %s' % missing
    return found


def in_archive(name):
    """The place of a header of ours below include/."""
    return name if name.startswith(PREFIX) else PREFIX + name


def packed(name, ours, abseil):
    """The text of a header of ours as it is in the archive."""
    text = read(ours[name]).decode()

    def include(match):
        return '%s"%s"' % (match[1], in_archive(match[2])) if match[2] in ours else match[0]
    text = OURS.sub(include, text)
    guard = GUARD.search(text)
    assert guard, 'no guard: ' + name
    if not name.startswith(PREFIX):
        text = re.sub(r'\b%s\b' % guard[1], 'TESSERA_' + guard[1], text)
    if name == FIRST:
        end = text.rindex('#endif')
        text = text[:end].rstrip() + '\n' + CHECK % abseil + '\n' + text[end:]
    return text.encode()


def main():
    out, version_header, *rest = sys.argv[1:]
    split = rest.index('--')
    files = dict(pair.split('=', 1) for pair in rest[:split])
    ours = {GENERATED.sub('', path): path for path in rest[split + 1:]}
    version, = VERSION.findall(read(version_header).decode())
    binaries = {name for name in files
                if re.match(r'(%s)?bin/|lib/[^/]*\.so' % APART, name)}
    apart = {name for name in binaries if name.startswith(APART)}
    beside = pack.libraries_of([files[n] for n in binaries - apart])
    for folder, libraries in (
            ('lib/', beside),
            (APART + 'lib/', pack.libraries_of([files[n] for n in apart]))):
        for name, path in libraries.items():
            files[folder + name] = path
            binaries.add(folder + name)
    filled_in = {b'@TESSERA_VERSION@': version,
                 b'@BESIDE@': ' '.join('-l:' + name for name in sorted(beside))}
    abseil, = NAMESPACE.findall(read(os.path.join(SYSTEM, ABSEIL)).decode())
    texts = {}
    for name, path in public_headers(ours).items():
        if name in ours:
            texts['include/' + in_archive(name)] = packed(name, ours, abseil)
        else:
            files['include/tessera/third_party/' + name] = path
    pack.RUN_PATH_TAG = pack.RPATH
    pack.ROOT = 'tessera-%s-linux-x86_64' % version
    with tempfile.TemporaryDirectory() as folder, \
            open(out, 'wb') as raw, \
            gzip.GzipFile('', 'wb', 9, raw, mtime=0) as zipped, \
            tarfile.open(fileobj=zipped, mode='w') as tar:
        for name in sorted({**files, **texts}):
            if name in binaries:
                pack.add(tar, name, pack.stripped(files[name], folder), True)
                continue
            data = texts[name] if name in texts else read(files[name])
            for mark, text in filled_in.items():
                data = data.replace(mark, text.encode())
            pack.add(tar, name, data, data.startswith(b'#!'))
        link = tarfile.TarInfo(pack.ROOT + '/lib/libtessera.so')
        link.type, link.linkname = tarfile.SYMTYPE, 'libtessera.so.0'
        tar.addfile(link)


if __name__ == '__main__':
    main()
