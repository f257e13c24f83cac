#!/usr/bin/python3
"""Reads a checkpoint, from docs/checkpoint_format.md alone.

    tools/read_checkpoint.py DIR

prints a line for each tensor and state, "NAME STATE DTYPE SIZES CRC32C" of its
elements in row-major order, and for each value of a rank's own "rank RANK NAME
BYTES CRC32C". Ends with 1 if anything is damaged.
"""
import os
import struct
import sys

SIZES = {dtype: 1 << i for i, dtypes in enumerate((
    "BOOL U8 I8 F8_E4M3 F8_E5M2", "I16 U16 F16 BF16", "I32 U32 F32",
    "I64 U64 F64")) for dtype in dtypes.split()}
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


def need(good, what, *args):
    if not good:
        sys.exit(what % args)


def varint(data, at):
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


class Message:
    def __init__(self, data):
        self.fields, at = {}, 0
        while at < len(data):
            key, at = varint(data, at)
            if key & 7 in (1, 5):
                size = 8 if key & 7 == 1 else 4
                value = int.from_bytes(data[at:at + size], "little")
            else:
                value, at = varint(data, at)
                size = value if key & 7 == 2 else 0
                value = data[at:at + size] if key & 7 == 2 else value
            at += size
            self.fields.setdefault(key >> 3, []).append(value)

    def number(self, key):
        return self.fields.get(key, [0])[0]

    def bytes(self, key):
        return self.fields.get(key, [b""])[0]

    def messages(self, key):
        return [Message(data) for data in self.fields.get(key, [])]

    def numbers(self, key):  # packed
        data, at, values = self.bytes(key), 0, []
        while at < len(data):
            value, at = varint(data, at)
            values.append(value)
        return values


def read_manifest(folder):
    with open(os.path.join(folder, "manifest"), "rb") as file:
        data = file.read()
    need(data[:8] == b"tsr ckpt" and
         len(data) == 20 + int.from_bytes(data[8:16], "little"),
         "manifest: is none, or cut off")
    need(crc32c(data[:-4]) == int.from_bytes(data[-4:], "little"),
         "manifest: its checksum differs")
    manifest = Message(data[16:-4])
    need(manifest.number(1) == 1, "manifest: is of another format than 1")
    return manifest


def read_file(path, entry):
    """A data file's bytes, and the index at their end."""
    with open(path, "rb") as file:
        data = file.read()
    need(len(data) == entry.number(1), "%s: has %d bytes", path, len(data))
    at = entry.number(2)
    index = data[at:at + entry.number(3)]
    need(crc32c(index) == entry.number(4), "%s: its index is damaged", path)
    return data[:at], Message(index)


def read_piece(path, data, piece, size):
    """Begin, end, and the bytes between."""
    begin, end, at = (piece.number(key) for key in (3, 4, 5))
    part, crcs = data[at:at + (end - begin) * size], piece.bytes(6)
    need(begin < end and len(part) == (end - begin) * size and
         len(crcs) == 4 * -(-len(part) // BLOCK), "%s: a piece is not in it "
         "as a whole, or has too few or too many checksums", path)
    for i, (crc,) in enumerate(struct.iter_unpack("<I", crcs)):
        need(crc32c(part[i * BLOCK:(i + 1) * BLOCK]) == crc,
             "%s: is damaged from byte %d on", path, at + i * BLOCK)
    return begin, end, part


def elements(data, size, offset, sizes, strides):
    """The bytes of a tensor in row-major order."""
    if not sizes:
        return data[offset * size:(offset + 1) * size]
    return b"".join(
        elements(data, size, offset + i * strides[0], sizes[1:], strides[1:])
        for i in range(sizes[0]))


def main(folder):
    manifest = read_manifest(folder)
    storages = manifest.messages(4)
    states = {(s, i): (state.bytes(1).decode(), state.bytes(2).decode(), [])
              for s, storage in enumerate(storages)
              for i, state in enumerate(storage.messages(3))}
    for rank, entry in enumerate(manifest.messages(5)):
        path = os.path.join(
            folder, "%016x.rank-%05d" % (manifest.number(2), rank))
        data, index = read_file(path, entry)
        for piece in index.messages(1):
            key = piece.number(1), piece.number(2)
            need(key in states, "%s: has a piece of no state", path)
            _, dtype, pieces = states[key]
            pieces.append(read_piece(path, data, piece, SIZES[dtype]))
        for value in index.messages(2):
            print("rank", rank, value.bytes(1).decode(), len(value.bytes(2)),
                  "%08x" % crc32c(value.bytes(2)))
    for (s, _), (name, dtype, pieces) in states.items():
        pieces.sort()
        ends = [0] + [end for _, end, _ in pieces]
        begins = [begin for begin, _, _ in pieces] + [storages[s].number(1)]
        need(begins == ends, "storage %d: a number of %s is in no file, or in "
             "several", s, name)
        data = b"".join(part for _, _, part in pieces)
        for tensor in storages[s].messages(2):
            sizes = tensor.numbers(3)
            ordered = elements(data, SIZES[dtype] * (1 + tensor.number(5)),
                               tensor.number(2), sizes, tensor.numbers(4))
            print(tensor.bytes(1).decode(), name, dtype, sizes,
                  "%08x" % crc32c(ordered))


if __name__ == "__main__":
    main(sys.argv[1])
