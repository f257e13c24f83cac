#!/usr/bin/python3
"""Does tools/torch_to_safetensors.py read what torch writes, and run none of it?

tools/testdata has what torch 2.11 and DeepSpeed 0.19.8 wrote (make_samples.py);
hostile files are made here.
"""

import contextlib
import io
import itertools
import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import types
import unittest
import warnings
import zipfile

sys.path.insert(0, "tools")
sys.dont_write_bytecode = True
from torch_archive import row_major  # pylint: disable=wrong-import-position
import torch_to_safetensors  # pylint: disable=wrong-import-position

TOOL = "tools/torch_to_safetensors.py"
PACK = {"BOOL": "?", "U8": "B", "I8": "b", "I16": "h", "U16": "H", "F16": "e",
        "I32": "i", "F32": "f", "I64": "q", "F64": "d"}
STATE = {
    "0.weight": ("F32", [2, 3]), "0.bias": ("F32", [2]), "1.weight": ("F32", [2]),
    "1.bias": ("F32", [2]), "1.running_mean": ("F32", [2]),
    "1.running_var": ("F32", [2]), "1.num_batches_tracked": ("I64", []),
    "bfloat16": ("BF16", [2, 3]), "float16": ("F16", [2, 3]),
    "float64": ("F64", [2, 3]), "int32": ("I32", [2, 3]), "int16": ("I16", [2, 3]),
    "int8": ("I8", [2, 3]), "uint8": ("U8", [2, 3]), "uint16": ("U16", [2, 3]),
    "bool": ("BOOL", [2, 3]), "tied.key": ("F32", [2, 3]), "rows": ("F32", [2, 4]),
    "columns": ("BF16", [3, 2]), "transposed": ("F32", [3, 4]),
    "permuted": ("F16", [2, 3, 4]), "parameter": ("F32", [3]),
    "marked": ("F32", [3]), "empty": ("F32", [0, 3])}
DCP = {"weight": ("F32", [5, 3]), "columns": ("BF16", [3, 5]),
       "transposed": ("F32", [3, 4]), "short": ("F32", [1])}
UNIVERSAL = {"a.weight": ("F32", [5, 3]), "b.weight": ("F32", [5, 3]),
             "count": ("I64", [])}


def expected_bytes(name, dtype, sizes):
    """By the formula of make_samples.py."""
    numel = 1
    for size in sizes:
        numel *= size
    out = b""
    for k in range(numel):
        number = (7 * k + len(name)) % 113
        if dtype == "BF16":
            out += struct.pack("<f", number)[2:]
        else:
            out += struct.pack("<" + PACK[dtype],
                               number % 2 if dtype == "BOOL" else number)
    return out


def read_safetensors(path):
    """name -> (dtype, sizes, bytes)."""
    with open(path, "rb") as file:
        data = file.read()
    size, = struct.unpack_from("<Q", data)
    header, at = json.loads(data[8:8 + size]), 0
    assert header.pop("__metadata__") == {"format": "pt"} and size % 8 == 0
    values = {}
    for name, tensor in header.items():
        begin, end = tensor["data_offsets"]
        item = 2 if tensor["dtype"] == "BF16" else struct.calcsize(PACK[tensor["dtype"]])
        assert begin == at and begin % item == 0, name
        at = end
        values[name] = (tensor["dtype"], tensor["shape"],
                        data[8 + size + begin:8 + size + end])
    assert 8 + size + at == len(data)
    return values


# ---- Files as torch writes them, and not quite ----

def utf8(text):
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def whole(number):
    return b"\x8a\x09" + struct.pack("<Qb", number, 0)


def tensor_pickle(numel=4, offset=0, sizes=(4,), strides=(1,), key="0", bits=b""):
    """Of one float32 tensor, what stands between PROTO and STOP."""
    sizes, strides = (b"(" + b"".join(map(whole, each)) + b"t"
                      for each in (sizes, strides))
    return (b"ctorch._utils\n_rebuild_tensor_v2\n((" + utf8("storage")
            + b"ctorch\nFloatStorage\n" + utf8(key) + utf8("cpu") + whole(numel)
            + b"tQ" + whole(offset) + sizes + strides
            + b"\x89ccollections\nOrderedDict\n)R" + bits + b"tR")


def state_pickle(*values, memo=b""):
    """A dict of v0, v1, ... with these pickles as values."""
    return b"\x80\x02}" + memo + b"(" + b"".join(
        utf8(f"v{i}") + value for i, value in enumerate(values)) + b"u."


def torch_zip(data, storages=(bytes(16),), order=b"little", compress=zipfile.ZIP_STORED,
              twice=False):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compress) as archive:
        archive.writestr("x/data.pkl", data)
        archive.writestr("x/byteorder", order)
        for i, storage in enumerate(storages * (2 if twice else 1)):
            archive.writestr(f"x/data/{i % len(storages)}", storage)
    return file.getvalue()


def torch_class(module, name):
    """A class that pickles under a name of torch, with its argument as state."""
    for i in range(1, module.count(".") + 2):
        path = ".".join(module.split(".")[:i])
        sys.modules.setdefault(path, types.ModuleType(path))

    def init(self, state):
        self.state = state
    made = type(name, (), {"__module__": module, "__init__": init,
                           "__getstate__": lambda self: self.state})
    setattr(sys.modules[module], name, made)
    return made


class Dtype:
    def __reduce__(self):
        return "float32"


METADATA = "torch.distributed.checkpoint.metadata"
Metadata, TensorMetadata, Chunk, Properties, Index = (
    torch_class(METADATA, name) for name in (
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex"))
Info = torch_class("torch.distributed.checkpoint.filesystem", "_StorageInfo")
Dtype.__module__ = "torch"
sys.modules["torch"].float32 = Dtype()


def write_dcp(folder, sizes, chunks, path="__0_0.distcp", listed=None, **info):
    """A folder with one tensor whose numbers are 0, 1, ..., of chunks (offsets,
    sizes), or those listed."""
    os.mkdir(folder)
    data, storage = b"", {}
    whole_strides = row_major(sizes)
    for begin, size in chunks:
        numbers = [sum((b + i) * s for b, i, s in zip(begin, place, whole_strides))
                   for place in itertools.product(*map(range, size))]
        item = torch_zip(
            b"\x80\x02" + tensor_pickle(len(numbers), 0, size, row_major(size)) + b".",
            [struct.pack(f"<{len(numbers)}f", *numbers)])
        storage[Index({"fqn": "v", "offset": begin, "index": 0})] = Info({
            "relative_path": path, "offset": len(data), "length": len(item), **info})
        data += item
    root = Metadata({
        "state_dict_metadata": {"v": TensorMetadata({
            "properties": Properties((sys.modules["torch"].float32,)), "size": sizes,
            "chunks": [Chunk({"offsets": b, "sizes": s})
                       for b, s in listed or chunks]})},
        "storage_data": storage, "planner_data": None})
    with open(os.path.join(folder, ".metadata"), "wb") as file:
        pickle.dump(root, file, protocol=4)
    with open(os.path.join(folder, "__0_0.distcp"), "wb") as file:
        file.write(data)


class Case(unittest.TestCase):
    def setUp(self):
        scope = tempfile.TemporaryDirectory()
        self.addCleanup(scope.cleanup)
        self.folder = scope.name
        self.out = self.path("out.safetensors")
        # Bazel shows us links, which are refused.
        self.samples = scope.name + ".samples/"
        self.addCleanup(shutil.rmtree, self.samples)
        shutil.copytree("tools/testdata", self.samples)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, data, name="in.pt"):
        with open(self.path(name), "wb") as file:
            file.write(data)
        return self.path(name)

    def convert(self, path, *options):
        """Values, and the line that says what was left out."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            torch_to_safetensors.main([path, self.out, *options])
        values = read_safetensors(self.out)
        os.remove(self.out)
        return values, said.getvalue()

    def refuse(self, words, path, *options):
        """One line with these words, exit code 1, and nothing written."""
        before = sorted(os.listdir(self.folder))
        with self.assertRaises(SystemExit) as caught:
            torch_to_safetensors.main([path, self.out, *options])
        line = caught.exception.code
        self.assertRegex(line, r"^torch_to_safetensors: [ -~]*$")
        self.assertIn(words, line)
        self.assertEqual(before, sorted(os.listdir(self.folder)))

    def refuse_pickle(self, words, data, **zipped):
        self.refuse(words, self.write(torch_zip(data, **zipped)))

    def check_values(self, expected, values, prefix=""):
        self.assertEqual({prefix + name for name in expected}, set(values))
        for name, (dtype, sizes) in expected.items():
            self.assertEqual(
                (dtype, sizes, expected_bytes(name, dtype, sizes)),
                values[prefix + name], name)


class Samples(Case):
    def test_torch_save(self):
        values, said = self.convert(self.samples + "state.pt", "--prefix", "model.")
        self.check_values(STATE, values)
        self.assertIn("names without the prefix", said)
        values, said = self.convert(self.samples + "state.pt")
        self.check_values(STATE, values, "model.")
        self.assertIn("left out: 3 optimizer states ('exp_avg', 'exp_avg_sq', 'step'),",
                      said)
        values, _ = self.convert(self.samples + "state.pt",
                                 "--prefix=optimizer.state.0.")
        self.assertEqual({"exp_avg", "exp_avg_sq", "step"}, set(values))

    def test_folder_of_bin_files(self):
        for i in (1, 2):
            shutil.copy(self.samples + "state.pt",
                        self.path(f"pytorch_model-0000{i}-of-00002.bin"))
        self.refuse("a name of its own", self.folder)
        self.write(torch_zip(state_pickle(tensor_pickle())),
                   "pytorch_model-00002-of-00002.bin")
        values, _ = self.convert(self.folder)
        self.assertEqual(len(STATE) + 1, len(values))
        os.remove(self.path("pytorch_model-00001-of-00002.bin"))
        self.refuse("expected the 00002 files", self.folder)

    def test_dcp(self):
        values, said = self.convert(self.samples + "dcp", "--prefix", "model.")
        self.check_values(DCP, values)
        values, said = self.convert(self.samples + "dcp")
        self.check_values(DCP, values, "model.")
        self.assertIn("2 optimizer states ('exp_avg', 'step'), 2 values that are no "
                      "tensors", said)
        values, _ = self.convert(self.samples + "dcp", "--prefix=optim.state.weight.")
        self.assertEqual(expected_bytes("exp_avg", "F32", [5, 3]), values["exp_avg"][2])

    def test_universal(self):
        for stage in "13":
            values, said = self.convert(self.samples + "universal" + stage)
            # zero/count/fp32.pt has the buffer, too, as float32.
            self.check_values(UNIVERSAL, values)
            self.assertIn("optimizer states ('exp_avg', 'exp_avg_sq'", said)
        values, _ = self.convert(self.samples + "universal1", "--prefix",
                                 "optim.state.a.weight.")
        self.assertEqual(expected_bytes("exp_avg", "F32", [5, 3]), values["exp_avg"][2])
        # What stage 1 has of the other name of a tied weight is its bfloat16 value.
        shutil.copy(self.samples + "universal1/zero/count/fp32.pt",
                    self.samples + "universal1/zero/b.weight/fp32.pt")
        values, _ = self.convert(self.samples + "universal1")
        self.assertEqual(values["a.weight"][2], values["b.weight"][2])
        # Flat, as the ranks of stage 3 held it.
        values, _ = self.convert(self.samples + "universal3", "--prefix",
                                 "optim.state.a.weight.")
        self.assertEqual([5, 3], values["exp_avg"][1])

    def test_universal_that_lacks_something(self):
        folder = self.path("u")
        shutil.copytree(self.samples + "universal3", folder)
        os.remove(folder + "/zero_pp_rank_0_mp_rank_00_model_states.pt")
        self.refuse("no *_model_states.pt of the folder has its shape", folder)
        shutil.rmtree(folder)
        shutil.copytree(self.samples + "universal1", folder)
        os.remove(folder + "/zero/a.weight/fp32.pt")
        self.refuse("has no 'a.weight'", folder)

    def test_tessera_imports_it(self):
        subprocess.run([TOOL, self.samples + "state.pt", self.out, "--prefix=model."],
                       check=True)
        subprocess.run(["tools/tessera", "checkpoint", "import", self.out,
                        self.path("c")], check=True)
        shown = subprocess.run(["tools/tessera", "checkpoint", "show",
                                self.path("c")], check=True, capture_output=True)
        self.assertIn(b"columns [3, 2]: value BF16", shown.stdout)


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
