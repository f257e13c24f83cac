#!/usr/bin/python3
"""Packs the library with its headers (docs/install.md).

usage: pack_dist.py OUT.tar.gz VERSION.h PATH_IN_THE_ARCHIVE=FILE ... -- HEADER ...

Of the headers, ours and those of abseil and protobuf on this system, what the
public ones include goes to include/tessera. Programs and libraries are treated
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
    'base/system/process_end.h', 'base/thread/wait_clock.h',
    'data/distributed_order.h',
    'data/distributed_sampler.h', 'data/images/cifar.h',
    'data/images/made_images.h', 'data/images/mnist.h',
    'data/mixture_order.h', 'data/tar/tar_shards.h',
    'data/text/packed_corpus.h', 'data/text/token_corpus.h',
    'data/text/token_writer.h', 'engine/summary.h', 'engine/tessera.h',
    'evaluation/evaluate.h', 'loader/client_state.h',
    'loader/data_loader.h', 'loader/tensor_data.h',
    'monitor/metrics_writer.h',
    'nn/linear_cross_entropy.h', 'nn/sync_batch_norm.h',
    'optim/custom/torch_optimizer.h', 'verify/verify.h']
APART = 'libexec/tessera/'
SYSTEM = '/usr/include'
THIRD_PARTY = ('absl/', 'google/protobuf/')
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
GENERATED = re.compile(r'^bazel-out/[^/]+/bin/')
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
    for name, path in public_headers(ours).items():
        files['include/tessera/' + name] = path
    pack.RUN_PATH_TAG = pack.RPATH
    pack.ROOT = 'tessera-%s-linux-x86_64' % version
    with tempfile.TemporaryDirectory() as folder, \
            open(out, 'wb') as raw, \
            gzip.GzipFile('', 'wb', 9, raw, mtime=0) as zipped, \
            tarfile.open(fileobj=zipped, mode='w') as tar:
        for name, path in sorted(files.items()):
            if name in binaries:
                pack.add(tar, name, pack.stripped(path, folder), True)
                continue
            data = read(path)
            for mark, text in filled_in.items():
                data = data.replace(mark, text.encode())
            pack.add(tar, name, data, data.startswith(b'#!'))
        link = tarfile.TarInfo(pack.ROOT + '/lib/libtessera.so')
        link.type, link.linkname = tarfile.SYMTYPE, 'libtessera.so.0'
        tar.addfile(link)


if __name__ == '__main__':
    main()
