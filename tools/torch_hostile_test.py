#!/usr/bin/python3
"""Does tools/torch_to_safetensors.py end in one line, whatever it is given, and run
none of it?"""

import contextlib
import itertools
import os
import resource
import shutil
import struct
import subprocess
import sys
import unittest
import warnings
import zipfile

sys.path.insert(0, "tools")
sys.dont_write_bytecode = True
from torch_test_files import (  # pylint: disable=wrong-import-position
    TOOL, Case, state_pickle, tensor_pickle, torch_zip, utf8, write_dcp)


class Hostile(Case):
    """None of these runs anything: `ran` would be there."""

    def test_calls(self):
        command = utf8(f"touch {self.path('ran')}")
        code = {
            "reduce": b"\x80\x02cposix\nsystem\n" + command + b"\x85R.",
            "newobj": b"\x80\x02cos\nsystem\n" + command + b"\x85\x81.",
            "stack_global": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + command
                            + b"\x85R.",
            "eval": b"\x80\x02c__builtin__\neval\n" + command + b"\x85R.",
            "dotted": b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93" + command
                      + b"\x85R.",
            "setstate": b"\x80\x02cargparse\nNamespace\n)\x81}" + utf8("__setstate__")
                        + b"cos\nsystem\nsb" + command + b"b."}
        for name, data in code.items():
            with self.subTest(name):
                self.refuse_pickle("which is refused", data)
        # The class is named, and with it who wrote it.
        self.refuse_pickle("'posix.system'", code["reduce"])
        self.refuse_pickle("'builtins.eval'", code["eval"])
        for name, data in {
                "inst": b"(" + command + b"ios\nsystem\n.",
                "obj": b"(cos\nsystem\n" + command + b"o.",
                "newobj_ex": b"\x80\x04\x8c\x05torch\x8c\x04Size\x93)}\x92.",
                "persid": b"Pos.system\n.", "ext": b"\x82\x01.",
                "buffer": b"\x96" + b"\xff" * 7 + b"\x7f"}.items():
            with self.subTest(name):
                self.refuse_pickle("which", data)
        self.assertFalse(os.path.exists(self.path("ran")))

    def test_allowed_names_do_nothing(self):
        get = (b"c__builtin__\ngetattr\nctorch\nTensor\n" + utf8("__class__")
               + b"\x86R")
        for words, data in {
                "there is no tensor": b"\x80\x02}" + utf8("v") + get + b"s.",
                "calls what is no class": b"\x80\x02" + get + b")R.",
                "sets the state": b"\x80\x02ctorch\nSize\n}b.",
                "no list": b"\x80\x02ctorch\nSize\nNa.",
                "keys": b"\x80\x02}N\x85Ns.",
                "no storage": b"\x80\x02" + utf8("x") + b"Q."}.items():
            with self.subTest(words):
                self.refuse_pickle(words, data)
        deep = b"\x80\x02})" + b"\x85" * 200_000 + b"Ns."
        self.refuse_pickle("keys are neither", deep)

    def test_bombs(self):
        nested = b"\x80\x02}q\0"
        for i in range(28):  # each a dict of the one before it, twice
            nested += b"}q%c(" % (i + 1) + b"".join(
                utf8(key) + b"h%c" % i for key in "ab") + b"u"
        self.refuse_pickle("in too many places", nested + b".")
        itself = b"\x80\x02}q\0" + utf8("a") + b"h\0s."
        self.refuse_pickle("in too many places", itself)
        deep = b"\x80\x02" + (b"}" + utf8("a")) * 200 + b"N" + b"s" * 200 + b"."
        self.refuse_pickle("in too many places", deep)
        # C's unpickler takes 64 GiB for this number of a memo.
        path = self.write(torch_zip(state_pickle(
            tensor_pickle(), memo=b"r\xff\xff\xff\xff")))
        done = subprocess.run(
            [TOOL, path, self.out], check=False, capture_output=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 28,) * 2))
        self.assertEqual((0, b""), (done.returncode, done.stderr))

    def test_tensors(self):
        for name, tensor in {
                "sizes": tensor_pickle(sizes=(1 << 40,)),
                "product": tensor_pickle(sizes=(1 << 40, 1 << 40), strides=(0, 0)),
                "expanded": tensor_pickle(sizes=(5,), strides=(0,)),
                "offset": tensor_pickle(offset=1),
                "far": tensor_pickle(offset=1 << 62, sizes=(1,)),
                "strides": tensor_pickle(sizes=(2,), strides=(4,))}.items():
            with self.subTest(name):
                self.refuse_pickle("in a storage of 4", state_pickle(tensor))
        self.refuse_pickle("expected whole numbers",
                           state_pickle(tensor_pickle(sizes=(1 << 63,))))
        self.refuse_pickle("a conjugate or negative bit", state_pickle(
            tensor_pickle(bits=b"}" + utf8("conj") + b"\x88s")))
        self.refuse_pickle("strides", state_pickle(tensor_pickle(strides=(1, 1))))
        self.refuse_pickle("expected 5 numbers of F32, got 16 bytes",
                           state_pickle(tensor_pickle(numel=5)))
        self.refuse_pickle("has no 'data/7'", state_pickle(tensor_pickle(key="7")))
        self.refuse_pickle("has no 'data/../data.pkl'",
                           state_pickle(tensor_pickle(key="../data.pkl")))

    def test_zips(self):
        good = state_pickle(tensor_pickle())
        self.refuse_pickle("is compressed", good, compress=zipfile.ZIP_DEFLATED)
        self.refuse_pickle("big-endian", good, order=b"big")
        with warnings.catch_warnings(action="ignore"):
            self.refuse_pickle("twice", good, twice=True)
        self.refuse("no zip file", self.write(good))
        self.refuse("no zip file", self.write(b""))
        data = torch_zip(good)
        listed = data.rindex(b"PK\1\2")  # x/data/0, in the directory
        self.refuse("is compressed", self.write(
            data[:listed + 10] + b"\x08" + data[listed + 11:]))
        self.refuse("'x/data/0' ends behind the file", self.write(
            data[:listed + 20] + b"\0\0\0\1" * 2 + data[listed + 28:]))
        at = data.index(b"x/data/0") + len("x/data/0")
        self.refuse("its checksum differs",
                    self.write(data[:at] + b"\1" + data[at + 1:]))

    def test_damage(self):
        with open(self.samples + "state.pt", "rb") as file:
            data = file.read()
        for size in range(0, len(data), 211):
            self.refuse("", self.write(data[:size]))
        for at in range(0, len(data), 31):  # any end is good but an unknown exception
            path = self.write(data[:at] + bytes([data[at] ^ 255]) + data[at + 1:])
            with contextlib.suppress(SystemExit):
                self.convert(path)
        self.assertEqual(["in.pt"], os.listdir(self.folder))

    def test_damaged_metadata(self):
        folder = self.path("dcp")
        shutil.copytree(self.samples + "dcp", folder)
        with open(folder + "/.metadata", "rb") as file:
            data = file.read()
        for at in range(0, len(data), 13):
            for byte in (data[at] ^ 255, data[at] ^ 1):
                with open(folder + "/.metadata", "wb") as file:
                    file.write(data[:at] + bytes([byte]) + data[at + 1:])
                with contextlib.suppress(SystemExit):
                    self.convert(folder)

    def test_chunks(self):
        rows = [((0, 0), (2, 3)), ((2, 0), (1, 3))]
        for i, (words, sizes, chunks) in enumerate([
                (None, (3, 3), rows),
                ("there is a gap", (4, 3), rows),
                ("overlap", (3, 3), rows + [((1, 1), (1, 1))]),
                ("overlap", (4, 3), [((0, 0), (2, 3)), ((1, 0), (2, 3))]),
                ("is not within", (2, 3), rows),
                ("is not within", (3, 3), [((0,), (9,))]),
                ("there is a gap", (1 << 40, 1 << 20), rows)]):
            with self.subTest(i):
                write_dcp(self.path(str(i)), sizes, chunks)
                if words:
                    self.refuse(words, self.path(str(i)))
                else:
                    self.convert(self.path(str(i)))
        for i, (words, listed) in enumerate([
                ("expected 3298534883328 numbers of F32", [((0, 0), (1 << 40, 3))]),
                ("no file has the chunk at (2, 1)",
                 [rows[0], ((2, 1), (1, 2)), ((2, 0), (1, 1))]),
                ("expected (3, 2) of F32 at (0, 0), got (2, 3)", [
                    ((0, 0), (3, 2)), ((2, 0), (0, 3)), ((0, 2), (3, 1))])]):
            path = self.path(f"listed{i}")
            sizes = (1 << 40 if i == 0 else 3, 3)
            write_dcp(path, sizes, rows + [((0, 2), (3, 1))], listed=listed)
            self.refuse(words, path)

    def test_chunks_in_all_dims(self):
        sizes, cuts = (3, 4, 5), ([(0, 2), (2, 1)], [(0, 1), (1, 3)], [(0, 5)])
        for i in range(3):  # the whole one is in each place once
            dims = [cuts[(i + d) % 3] for d in range(3)]
            turned = tuple(sizes[(i + d) % 3] for d in range(3))
            chunks = [tuple(zip(*corner)) for corner in itertools.product(*dims)]
            write_dcp(self.path(str(i)), turned, chunks)
            values, _ = self.convert(self.path(str(i)))
            self.assertEqual(("F32", list(turned), struct.pack("<60f", *range(60))),
                             values["v"])

    def test_places_of_items(self):
        one = [((0,), (2,))]
        for i, path in enumerate(["../in.pt", "/etc/passwd", "..", ".", "", "a/b",
                                  "a\0b"]):
            write_dcp(self.path(str(i)), (2,), one, path=path)
            self.refuse("expected a file of this folder", self.path(str(i)))
        write_dcp(self.path("far"), (2,), one, length=1 << 50)
        self.refuse("is it truncated?", self.path("far"))
        write_dcp(self.path("minus"), (2,), one, offset=-1)
        self.refuse("expected whole numbers", self.path("minus"))
        write_dcp(self.path("one"), (4,), [((0,), (2,)), ((2,), (2,))], offset=0)
        self.refuse("two items have the byte 0", self.path("one"))
        write_dcp(self.path("zstd"), (2,), one, transform_descriptors=["zstd"])
        self.refuse("by an extension", self.path("zstd"))

    def test_kinds_of_files(self):
        folder = self.path("dcp")
        write_dcp(folder, (2,), [((0,), (2,))])
        os.rename(folder + "/__0_0.distcp", self.path("moved"))
        os.symlink(self.path("moved"), folder + "/__0_0.distcp")
        self.refuse("symbolic links", folder)
        os.remove(folder + "/__0_0.distcp")
        os.mkfifo(folder + "/__0_0.distcp")
        self.refuse("is no plain file", folder)
        self.refuse("is no plain file", folder + "/__0_0.distcp")
        os.remove(folder + "/.metadata")
        self.refuse("expected a file of torch.save, or a folder", folder)
        os.mkdir(folder + "/zero")
        os.symlink(self.folder, folder + "/zero/v\x1b[2J")
        self.refuse("is a link", folder)

    def test_names(self):
        for name in ("__metadata__", "\ud800"):
            text = name.encode("utf-8", "surrogatepass")
            self.refuse_pickle("name", b"\x80\x02}X" + struct.pack("<I", len(text))
                               + text + tensor_pickle() + b"s.")
        self.refuse_pickle("expected a name of its own",
                           b"\x80\x02" + tensor_pickle() + b".")
        self.refuse_pickle("is", b"\x80\x02cos\n\x1b[2Jx\n.")

    def test_output_is_new(self):
        self.write(b"mine", "out.safetensors")
        self.refuse("exists already", self.samples + "state.pt")
        os.remove(self.out)
        os.symlink(self.path("nowhere"), self.out)
        self.refuse("exists already", self.samples + "state.pt")

    def test_as_a_command(self):
        path = self.write(torch_zip(b"\x80\x02cos\nsystem\n."))
        done = subprocess.run([TOOL, path, self.out], check=False, capture_output=True)
        self.assertEqual(1, done.returncode)
        self.assertEqual(1, done.stderr.count(b"\n"))
        self.assertIn(b"names 'os.system', which is refused", done.stderr)


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
