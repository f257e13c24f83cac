"""Files of torch.save, read and not run, for torch_to_safetensors.py.

A pickle is a program, which torch.load may run. Here it can name what stands in
CLASSES alone, and calls nothing else; what it makes of that is tensors, which are
places in a file, plain values, and Inert. No memory is taken that it has not the
bytes for. Every fault is one line, in a Refused.
"""

import collections
import contextlib
import functools
import io
import math
import os
import pickle
import stat
import struct
import zipfile
import zlib

MAX_PICKLE = 256 << 20  # objects take some ten times the bytes of their pickle
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2,
         "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8,
         "U64": 8, "F64": 8, "C64": 8}

Entry = collections.namedtuple("Entry", "begin size crc")
Storage = collections.namedtuple("Storage", "archive dtype entry")
Tensor = collections.namedtuple(
    "Tensor", "archive dtype entry offset sizes strides")  # all but entry: numbers


class Refused(Exception):
    """One line for the user."""


def need(condition, what):
    if not condition:
        raise Refused(what)


@contextlib.contextmanager
def naming(what):
    """Errors say where they were met."""
    try:
        yield
    except Refused as error:
        raise Refused(f"{what}: {error}") from None


def shown(value):
    """What a terminal may be given of a file's text."""
    return ascii(value)[:200] if isinstance(value, str) else type(value).__name__


def counts(values, what):
    """A tuple of whole numbers from 0 below 2^63."""
    need(isinstance(values, (tuple, list)) and all(
        type(v) is int and 0 <= v < 1 << 63 for v in values),
         f"{what}: expected whole numbers from 0")
    return tuple(values)


def row_major(sizes):
    """The strides of a contiguous tensor."""
    return tuple(math.prod(sizes[i + 1:]) for i in range(len(sizes)))


# ---- What a pickle may name ----

class Inert:
    """An object whose class does nothing here."""
    __slots__ = ("kind", "args", "state")

    def __init__(self, kind, *args):
        self.kind, self.args, self.state = kind, args, None

    def get(self, kind, key):
        need(isinstance(self.state, dict) and key in self.state
             and self.kind.endswith("." + kind), f"expected a {kind} with {key}")
        return self.state[key]


def rebuild_tensor(storage, offset, sizes, strides, _grad=None, _hooks=None,
                   metadata=None, dtype=None):
    need(isinstance(storage, Storage), "a tensor without a storage")
    need(not metadata, "a tensor with a conjugate or negative bit: save a clone")
    dtype = dtype or storage.dtype
    sizes, strides = counts(sizes, "sizes"), counts(strides, "strides")
    offset, = counts([offset], "offset")
    need(isinstance(dtype, str) and dtype in SIZES and len(sizes) == len(strides),
         "a tensor without a dtype, or with a number of strides that is not its own")
    numel, held = math.prod(sizes), storage.entry.size // SIZES[dtype]
    last = sum((n - 1) * s for n, s in zip(sizes, strides)) if numel else -1
    need(offset + last < held and numel <= held,
         f"a tensor of {numel} numbers from {offset} on in a storage of {held}; is it "
         "truncated, or an expanded view (save a clone)?")
    return Tensor(storage.archive, dtype, storage.entry, offset, sizes, strides)


def rebuild_tensor_v3(storage, offset, sizes, strides, grad, hooks, dtype,
                      metadata=None):
    return rebuild_tensor(storage, offset, sizes, strides, grad, hooks, metadata,
                          dtype)


def rebuild_from_type(function, _type, args, _state):
    need(function is rebuild_tensor or function is rebuild_tensor_v3,
         "a tensor of an unknown kind")
    return function(*args)


def empty_dict(*args):
    need(not any(isinstance(arg, (tuple, list)) for arg in args),
         "a dict of Python 2: save it again")
    return {}


def first(value, *_):
    return value


CLASSES = {
    "collections.OrderedDict": empty_dict,
    "collections.defaultdict": empty_dict,
    "torch.Size": lambda values=(): counts(values, "torch.Size"),
    "torch._utils._rebuild_tensor": rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": first,
    "torch._utils._rebuild_parameter_with_state": first,
    "torch._tensor._rebuild_from_type_v2": rebuild_from_type,
    "torch.storage.UntypedStorage": "U8",
    **{f"torch.{name}": dtype for name, dtype in {
        "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2", "int16": "I16", "uint16": "U16", "float16": "F16",
        "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32",
        "int64": "I64", "uint64": "U64", "float64": "F64", "complex64": "C64"}.items()},
    **{f"torch.{name}Storage": dtype for name, dtype in {
        "Bool": "BOOL", "Byte": "U8", "Char": "I8", "Short": "I16", "Half": "F16",
        "BFloat16": "BF16", "Int": "I32", "Float": "F32", "Long": "I64",
        "Double": "F64", "ComplexFloat": "C64"}.items()},
    **{name: functools.partial(Inert, name) for name in [
        # An enum's member is getattr(class, name); this getattr gets nothing.
        "argparse.Namespace", "builtins.complex", "builtins.dict", "builtins.getattr",
        "builtins.list", "builtins.set", "collections.Counter", "_codecs.encode",
        "pathlib.PosixPath", "pathlib._local.PosixPath", "torch.device",
        "torch.Tensor", "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        *("torch.distributed.checkpoint.metadata." + name for name in (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata",
            "ChunkStorageMetadata", "TensorProperties", "MetadataIndex",
            "StorageMeta", "_MEM_FORMAT_ENCODING")),
        *("torch.distributed._shard.sharded_tensor.metadata." + name for name in (
            "TensorProperties", "MEM_FORMAT_ENCODING"))]},
}


class Opcodes(dict):
    def __missing__(self, opcode):
        raise Refused(f"has the opcode {bytes([opcode])!r}, which torch does not write")


class Unpickler(pickle._Unpickler):  # pylint: disable=protected-access
    """Knows the opcodes that torch writes. It is Python's, not C's, which takes
    memory for any number that a memo is given, and may end the process hashing a
    key of tuples in tuples."""

    dispatch = Opcodes((getattr(pickle, name)[0], pickle._Unpickler.dispatch[
        getattr(pickle, name)[0]]) for name in (
            "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
            "BINFLOAT BINUNICODE SHORT_BINUNICODE BINBYTES SHORT_BINBYTES BINPERSID "
            "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST EMPTY_DICT BINPUT "
            "LONG_BINPUT BINGET LONG_BINGET MEMOIZE GLOBAL STACK_GLOBAL").split())

    def __init__(self, data, archive):
        super().__init__(io.BytesIO(data))
        self.archive = archive

    def find_class(self, module, name):
        full = f"{module}.{name}".replace("__builtin__.", "builtins.", 1)
        need(full in CLASSES,
             f"its pickle names {shown(full)}, which is refused (it could be code to "
             "run): expected tensors and plain values; save the state dict alone")
        return CLASSES[full]

    def persistent_load(self, pid):
        need(self.archive and isinstance(pid, tuple) and len(pid) == 5
             and pid[0] == "storage" and isinstance(pid[1], str) and pid[1] in SIZES
             and isinstance(pid[2], str), "has a reference that is no storage")
        numel, = counts([pid[4]], "a storage's size")
        entry = self.archive.entry("data/" + pid[2])
        need(entry.size == numel * SIZES[pid[1]], f"data/{shown(pid[2])}: expected "
             f"{numel} numbers of {pid[1]}, got {entry.size} bytes")
        return Storage(self.archive, pid[1], entry)

    def call(self):
        args = self.stack.pop()
        function = self.stack[-1]
        need(callable(function) and isinstance(args, tuple), "calls what is no class")
        self.stack[-1] = function(*args)

    def build(self):
        state = self.stack.pop()
        if isinstance(self.stack[-1], Inert):
            self.stack[-1].state = state
        else:  # a state dict has the versions of its modules as an attribute
            need(isinstance(self.stack[-1], dict), "sets the state of a plain value")

    def append_all(self, items):
        need(isinstance(self.stack[-1], list), "appends to what is no list")
        self.stack[-1].extend(items)

    def set_all(self, items):
        need(isinstance(self.stack[-1], dict) and all(isinstance(
            key, (str, int, float, bytes, Inert, type(None))) for key in items[::2]),
             "has a dict whose keys are neither names nor numbers")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch.update({
        pickle.REDUCE[0]: call, pickle.NEWOBJ[0]: call, pickle.BUILD[0]: build,
        pickle.APPEND[0]: lambda self: self.append_all([self.stack.pop()]),
        pickle.APPENDS[0]: lambda self: self.append_all(self.pop_mark()),
        pickle.SETITEM[0]: lambda self: self.set_all(
            [self.stack.pop(-2), self.stack.pop()]),
        pickle.SETITEMS[0]: lambda self: self.set_all(self.pop_mark())})


def unpickle(data, archive=None):
    try:
        return Unpickler(data, archive).load()
    except Refused:
        raise
    except Exception as error:  # pylint: disable=broad-except
        raise Refused("its pickle is damaged, or not of torch: "
                      f"{type(error).__name__} {shown(str(error))}") from None


# ---- Files ----

class Part:
    """Bytes of a plain file, all of it or some; for zipfile, too."""

    def __init__(self, path, begin=0, size=None, follow=False):
        self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK |
                          (0 if follow else os.O_NOFOLLOW))
        status = os.fstat(self.fd)
        self.begin, self.at = begin, 0
        self.size = status.st_size - begin if size is None else size
        with naming(path), contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            need(stat.S_ISREG(status.st_mode), "is no plain file")
            need(begin + self.size <= status.st_size, f"expected {begin + self.size} "
                 f"bytes, got {status.st_size}: is it truncated?")
            on_error.pop_all()

    def read(self, size=-1):
        left = max(self.size - self.at, 0)
        data = os.pread(self.fd, left if size < 0 else min(size, left),
                        self.begin + self.at)
        self.at += len(data)
        return data

    def seek(self, at, whence=0):
        at += (0, self.at, self.size)[whence]
        need(at >= 0, "is no zip file of torch.save")
        self.at = at
        return at

    def tell(self):
        return self.at

    def seekable(self):
        return True

    def close(self):
        os.close(self.fd)

    def read_all(self, begin, size):
        data = bytearray()
        self.seek(begin)
        while len(data) < size:
            more = self.read(min(size - len(data), 64 << 20))
            need(more, "was truncated while it was read")
            data += more
        return data


def check_crc(entry, crc):
    need(entry.crc in (0, crc),  # 0: torch was told to compute none
         "its checksum differs: the file is damaged")


class Archive:
    """What torch.save wrote, in a file or a part of one. `root` is the object."""

    def __init__(self, path, begin=0, size=None, follow=False):
        self.path = path if size is None else f"{path}, {size} bytes at {begin}"
        self.open = functools.partial(Part, path, begin, size, follow)
        self.entries, self.top = {}, ""
        with contextlib.closing(self.open()) as part, naming(self.path):
            for info in self.infos(part):
                self.add(part, info)
            found = [name for name in self.entries if name.endswith("/data.pkl")]
            need(len(found) == 1, f"expected one data.pkl, got {len(found)}; is it of "
                 "torch.save?")
            self.top = found[0][:-len("data.pkl")]
            order = self.entries.get(self.top + "byteorder")
            need(order is None or order.size == 6 and part.read_all(
                order.begin, 6) == b"little", "is of a big-endian machine")
            entry = self.entries[found[0]]
            need(entry.size <= MAX_PICKLE,
                 f"data.pkl: expected {MAX_PICKLE} bytes at most, got {entry.size}")
            data = part.read_all(entry.begin, entry.size)
            check_crc(entry, zlib.crc32(data))
            self.pickle_bytes = len(data)
            self.root = unpickle(data, self)

    @staticmethod
    def infos(part):
        try:
            with zipfile.ZipFile(part) as names:
                return names.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):
            raise Refused("is no zip file of torch.save; is it truncated, or of a "
                          "torch before 1.6 (load it there, save it again)?") from None

    def add(self, part, info):
        name = shown(info.filename)
        need(info.filename not in self.entries, f"has {name} twice")
        need(info.compress_type == zipfile.ZIP_STORED and not info.flag_bits & 1
             and info.compress_size == info.file_size,
             f"{name} is compressed, which torch.save does not do: save it again")
        part.seek(info.header_offset)
        head = part.read(30)
        need(len(head) == 30 and head[:4] == b"PK\3\4", f"{name}: has no header")
        begin = part.tell() + sum(struct.unpack_from("<HH", head, 26))
        need(begin + info.file_size <= part.size, f"{name} ends behind the file")
        self.entries[info.filename] = Entry(begin, info.file_size, info.CRC)

    def entry(self, name):
        need(self.top + name in self.entries, f"has no {shown(name)}")
        return self.entries[self.top + name]

    def tensors(self):
        """(name, Tensor) of a state dict; (name, None) of other values."""
        # Few bytes can say: a dict of dicts of one dict, over and over.
        left = [4 * self.pickle_bytes, 100_000_000]  # values, and bytes of names

        def walk(value, name, depth):
            left[0] -= 1
            left[1] -= len(name)
            need(min(left) >= 0 and depth < 32, "has values in too many places")
            if isinstance(value, (dict, list, tuple)) and not isinstance(value, Tensor):
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                for key, each in pairs:
                    key = key if isinstance(key, (str, int)) else "?"
                    yield from walk(each, f"{name}.{key}" if depth else str(key),
                                    depth + 1)
            else:
                yield name, value if isinstance(value, Tensor) else None

        with naming(self.path):
            yield from walk(self.root, "", 0)

