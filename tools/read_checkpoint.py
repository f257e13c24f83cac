#!/usr/bin/python3
"""Reads a checkpoint, from docs/checkpoint_format.md alone.

    tools/read_checkpoint.py DIR

prints a line for each tensor and state, "NAME STATE DTYPE SIZES CRC32C" of its
elements in row-major order, and ends with 1 if anything is damaged.
"""

import os
import struct
import sys

SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2,
         "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8,
         "U64": 8, "F64": 8}
BLOCK = 65536
TABLE = []
for byte in range(256):
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    TABLE.append(byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def message(data):
    """Field number -> its values: numbers, or bytes."""
    fields, at = {}, 0
    while at < len(data):
        key, at = varint(data, at)
        if key & 7 == 0:
            value, at = varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(key & 7)
            if size is None:
                size, at = varint(data, at)
            value, at = data[at:at + size], at + size
        fields.setdefault(key >> 3, []).append(value)
    return fields


def number(fields, key):
    return fields.get(key, [0])[0]


def text(fields, key):
    return fields.get(key, [b""])[0].decode()


def packed(fields, key):
    data, at, values = fields.get(key, [b""])[0], 0, []
    while at < len(data):
        value, at = varint(data, at)
        values.append(value)
    return values


def check(what, data, crc):
    if crc32c(data) != crc:
        sys.exit("%s: its checksum differs" % what)


def read_manifest(folder):
    with open(os.path.join(folder, "manifest"), "rb") as file:
        data = file.read()
    length, = struct.unpack_from("<Q", data, 8)
    if data[:8] != b"tsr ckpt" or len(data) != 20 + length:
        sys.exit("manifest: is none")
    check("manifest", data[:-4], struct.unpack("<I", data[-4:])[0])
    return message(data[16:-4])


def read_states(folder, manifest):
    """(storage, state) -> its bytes."""
    storages = [message(s) for s in manifest.get(4, [])]
    dtypes = [[text(message(t), 2) for t in s.get(3, [])] for s in storages]
    states = {(s, i): bytearray(number(storages[s], 1) * SIZES[dtype])
              for s, of in enumerate(dtypes) for i, dtype in enumerate(of)}
    runs = {key: [] for key in states}
    ident, = struct.unpack("<Q", manifest[2][0])
    for rank, entry in enumerate(map(message, manifest.get(5, []))):
        name = "%016x.rank-%05d" % (ident, rank)
        with open(os.path.join(folder, name), "rb") as file:
            data = file.read()
        if len(data) != number(entry, 1):
            sys.exit("%s: has %d bytes" % (name, len(data)))
        begin = number(entry, 2)
        index = data[begin:begin + number(entry, 3)]
        check(name + ": index", index, struct.unpack("<I", entry[4][0])[0])
        for piece in map(message, message(index).get(1, [])):
            key = number(piece, 1), number(piece, 2)
            size = SIZES[dtypes[key[0]][key[1]]]
            begin, end, at = (number(piece, k) for k in (3, 4, 5))
            run = data[at:at + (end - begin) * size]
            for i, (crc,) in enumerate(struct.iter_unpack("<I", piece[6][0])):
                check("%s: storage %d" % (name, key[0]),
                      run[i * BLOCK:(i + 1) * BLOCK], crc)
            states[key][begin * size:end * size] = run
            runs[key].append((begin, end))
    for key, ranges in runs.items():
        at = 0
        for begin, end in sorted(ranges):
            if begin != at:
                sys.exit("storage %d: number %d is in no file, or in several"
                         % (key[0], at))
            at = end
        if at != number(storages[key[0]], 1):
            sys.exit("storage %d: number %d is in no file" % (key[0], at))
    return storages, dtypes, states


def elements(data, size, offset, sizes, strides):
    """The bytes of a tensor in row-major order."""
    if not sizes:
        return data[offset * size:(offset + 1) * size]
    return b"".join(
        elements(data, size, offset + i * strides[0], sizes[1:], strides[1:])
        for i in range(sizes[0]))


def main(folder):
    storages, dtypes, states = read_states(folder, read_manifest(folder))
    for s, storage in enumerate(storages):
        for tensor in map(message, storage[2]):
            sizes = packed(tensor, 3)
            for i, state in enumerate(map(message, storage.get(3, []))):
                size = SIZES[dtypes[s][i]] * (2 if number(tensor, 5) else 1)
                data = elements(states[s, i], size, number(tensor, 2), sizes,
                                packed(tensor, 4))
                print(text(tensor, 1), text(state, 1), dtypes[s][i], sizes,
                      "%08x" % crc32c(data))


if __name__ == "__main__":
    main(sys.argv[1])
