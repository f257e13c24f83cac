"""What the tests of torch_to_safetensors.py share: files as torch writes them, and
not quite, and the check of what becomes of them."""

import contextlib
import io
import itertools
import json
import os
import pickle
import shutil
import struct
import sys
import tempfile
import types
import unittest
import zipfile

from torch_archive import row_major
import torch_to_safetensors

TOOL = "tools/torch_to_safetensors.py"
PACK = {"BOOL": "?", "U8": "B", "I8": "b", "I16": "h", "U16": "H", "F16": "e",
        "I32": "i", "F32": "f", "I64": "q", "F64": "d"}


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
