#!/usr/bin/python3
"""Packs programs and files for machines without Bazel (docs/bundle.md).

usage: pack.py OUT.tar.gz [PATH_IN_THE_BUNDLE=FILE ...]

Programs (bin/NAME) are stripped, and their run path, which names folders of
this machine, becomes $ORIGIN/../lib; DT_RUNPATH, so that LD_LIBRARY_PATH comes
first. The shared libraries of the system that they need go to lib/, except
those that every machine has: glibc and GCC's. libtorch and CUDA's are not taken, nor
what only they need: they are where this machine's run path says, and on another
one where its Python is.
"""
import gzip
import io
import os
import re
import struct
import subprocess
import sys
import tarfile
import tempfile

ROOT = 'tessera'
RUN_PATH = b'$ORIGIN/../lib\0'
# Of the system's libraries, those that are not taken.
BASIC = re.compile(r'(ld-linux-.*|lib(c|m|dl|rt|pthread|util|gcc_s|stdc\+\+))\.so')
SYSTEM = re.compile(r'(/usr)?/lib(64|/x86_64-linux-gnu)?/[^/]+$')
NEEDED, STRTAB, RPATH, RUNPATH = 1, 5, 15, 29  # tags of <elf.h>
RUN_PATH_TAG = RUNPATH
LOAD, DYNAMIC = 1, 2


class Elf:
    """The dynamic section of a 64-bit little-endian file, in memory."""

    def __init__(self, path):
        with open(path, 'rb') as file:
            self.bytes = bytearray(file.read())
        assert self.bytes[:6] == b'\x7fELF\x02\x01', path
        start, = struct.unpack_from('<Q', self.bytes, 32)
        size, count = struct.unpack_from('<HH', self.bytes, 54)
        self.loads, dynamic = [], None
        for i in range(count):
            kind, _, offset, address, _, length = struct.unpack_from(
                '<IIQQQQ', self.bytes, start + i * size)
            if kind == LOAD:
                self.loads.append((address, offset, length))
            if kind == DYNAMIC:
                dynamic = offset, length
        self.entries = []  # (place in the file, tag, value)
        for place in range(dynamic[0], sum(dynamic), 16):
            self.entries.append(
                (place, *struct.unpack_from('<QQ', self.bytes, place)))
        strings = [value for _, tag, value in self.entries if tag == STRTAB][0]
        self.strings = next(strings - address + offset
                            for address, offset, length in self.loads
                            if address <= strings < address + length)

    def text(self, value):
        start = self.strings + value
        return self.bytes[start:self.bytes.index(0, start)]

    def needed(self):
        return [self.text(value).decode()
                for _, tag, value in self.entries if tag == NEEDED]

    def make_relative(self):
        for place, tag, value in self.entries:
            if tag not in (RPATH, RUNPATH):
                continue
            old = len(self.text(value)) + 1
            assert old >= len(RUN_PATH), 'a run path too short to be replaced'
            struct.pack_into('<Q', self.bytes, place, RUN_PATH_TAG)
            start = self.strings + value
            self.bytes[start:start + old] = RUN_PATH.ljust(old, b'\0')


def loaded_from(program):
    """Returns {name: path} of all that the program would load here."""
    lines = subprocess.run(['ldd', program], check=True, text=True,
                           stdout=subprocess.PIPE).stdout
    missing = re.findall(r'(\S+) => not found', lines)
    assert not missing, '%s: not found: %s' % (program, missing)
    return dict(re.findall(r'(\S+) => (/\S+)', lines))


def libraries_of(programs):
    """Returns {name: path} of what lib/ must hold."""
    taken = {}
    for program in programs:
        paths = loaded_from(program)
        waiting = Elf(program).needed()
        while waiting:
            name = waiting.pop()
            path = paths.get(name, '')
            if name in taken or BASIC.match(name) or not SYSTEM.match(path):
                continue
            taken[name] = os.path.realpath(path)
            waiting += Elf(path).needed()
    return taken


def stripped(path, folder):
    """Returns the bytes of a program or library as the bundle has it."""
    out = os.path.join(folder, 'stripped')
    subprocess.run(['strip', '-o', out, path], check=True)
    elf = Elf(out)
    elf.make_relative()
    return bytes(elf.bytes)


def add(tar, name, data, executable):
    """The same bytes for the same contents, whoever packs and when."""
    info = tarfile.TarInfo('%s/%s' % (ROOT, name))
    info.size = len(data)
    info.mode = 0o755 if executable else 0o644
    tar.addfile(info, io.BytesIO(data))


def main():
    out, *pairs = sys.argv[1:]
    files = dict(pair.split('=', 1) for pair in pairs)
    programs = [path for name, path in files.items() if name.startswith('bin/')]
    for name, path in libraries_of(programs).items():
        files['lib/' + name] = path
    with tempfile.TemporaryDirectory() as folder, \
            open(out, 'wb') as raw, \
            gzip.GzipFile('', 'wb', 9, raw, mtime=0) as zipped, \
            tarfile.open(fileobj=zipped, mode='w') as tar:
        for name, path in sorted(files.items()):
            if name.startswith(('bin/', 'lib/')):
                add(tar, name, stripped(path, folder), True)
            else:
                with open(path, 'rb') as file:
                    data = file.read()
                add(tar, name, data, data.startswith(b'#!'))


if __name__ == '__main__':
    main()
