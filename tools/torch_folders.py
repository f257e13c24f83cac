"""The checkpoints that torch_to_safetensors.py reads: which tensors they have.

Each kind gives pairs (name, function that gives a Value, or None of what is no
tensor), so that what is not taken is not opened.
"""

import collections
import contextlib
import functools
import glob
import math
import os
import re

from torch_archive import (MAX_PICKLE, SIZES, Archive, Inert, Part, Tensor, counts,
                           naming, need, row_major, shown, unpickle)

# A tensor to write. Of parts: (offsets, sizes, function that gives the Tensor).
Value = collections.namedtuple("Value", "dtype sizes parts")


def whole(tensor):
    need(isinstance(tensor, Tensor), "expected a tensor")
    return Value(tensor.dtype, tensor.sizes, [
        ((0,) * len(tensor.sizes), tensor.sizes, lambda: tensor)])


def in_archive(archive):
    for name, tensor in archive.tensors():
        yield name, tensor and functools.partial(whole, tensor)


def in_bin_files(folder, paths):
    for path in paths:
        numbers = re.search(r"-(\d+)-of-(\d+)\.bin$", path)
        need(not numbers or int(numbers[2]) == len(paths),
             f"{folder}: expected the {numbers and numbers[2]} files that "
             f"{os.path.basename(path)} is one of, got {len(paths)}")
        yield from in_archive(Archive(path))


class DcpFolder:
    """A folder of torch.distributed.checkpoint."""

    def __init__(self, folder):
        self.folder, self.items, self.used = folder, {}, []
        path = os.path.join(folder, ".metadata")
        with contextlib.closing(Part(path)) as part, naming(path):
            need(part.size <= MAX_PICKLE,
                 f"expected {MAX_PICKLE} bytes at most, got {part.size}")
            root = unpickle(part.read_all(0, part.size))
            need(isinstance(root, Inert), "expected a Metadata")
            self.tensors = root.get("Metadata", "state_dict_metadata")
            storage = root.get("Metadata", "storage_data")
            need(isinstance(self.tensors, dict) and isinstance(storage, dict),
                 "expected two dicts")
            for index, info in storage.items():
                self.add_item(index, info)

    def add_item(self, index, info):
        need(isinstance(index, Inert) and isinstance(info, Inert),
             "storage_data: expected MetadataIndex and _StorageInfo")
        name, offset = index.get("MetadataIndex", "fqn"), index.state.get("offset")
        need(isinstance(name, str), "fqn: expected a name")
        key = name, offset if offset is None else counts(offset, "offset")
        need(key not in self.items, f"{shown(name)}: has two items at one offset")
        path = info.get("_StorageInfo", "relative_path")
        need(isinstance(path, str) and path not in ("", ".", "..")
             and "/" not in path and "\0" not in path,
             f"relative_path {shown(path)}: expected a file of this folder")
        need(not info.state.get("transform_descriptors"), f"{shown(name)}: was written "
             "by an extension (compressed?): save it without")
        self.items[key] = (os.path.join(self.folder, path), *counts(
            [info.get("_StorageInfo", "offset"), info.get("_StorageInfo", "length")],
            "_StorageInfo"))

    def __iter__(self):
        for name, value in self.tensors.items():
            need(isinstance(name, str) and isinstance(value, Inert),
                 "state_dict_metadata: expected names and their metadata")
            plain = value.kind.endswith(".BytesStorageMetadata")
            yield name, None if plain else functools.partial(self.value, name, value)

    def value(self, name, value):
        kind = "TensorStorageMetadata"
        sizes = counts(value.get(kind, "size"), "size")
        properties, chunks = value.get(kind, "properties"), value.get(kind, "chunks")
        need(isinstance(properties, Inert) and isinstance(properties.state, tuple)
             and properties.state and isinstance(properties.state[0], str)
             and properties.state[0] in SIZES, "expected TensorProperties with a dtype")
        need(isinstance(chunks, list) and all(isinstance(c, Inert) for c in chunks),
             "expected a list of chunks")
        dtype, parts = properties.state[0], []
        for chunk in chunks:
            begin, size = (counts(chunk.get("ChunkStorageMetadata", key), key)
                           for key in ("offsets", "sizes"))
            if math.prod(size) or not math.prod(sizes):
                parts.append((begin, size, self.item(name, begin, size, dtype)))
        check_covered(sizes, parts)
        return Value(dtype, sizes, parts)

    def item(self, name, begin, size, dtype):
        item = self.items.get((name, begin)) or self.items.get((name, None))
        need(item, f"no file has the chunk at {begin}")
        need(math.prod(size) * SIZES[dtype] <= item[2],
             f"expected {math.prod(size)} numbers of {dtype}, got {item[2]} bytes")
        self.used.append(item)
        return functools.partial(lambda: Archive(*item).root)

    def check_used(self):
        """Two tensors in one place: a small file would make a large one."""
        used = sorted(self.used)
        for (path, begin, size), after in zip(used, used[1:]):
            need(path != after[0] or begin + size <= after[1],
                 f"{path}: two items have the byte {after[1]}")


def check_covered(sizes, parts):
    """Each element is in one chunk."""
    active = []
    for begin, size, _ in sorted(parts, key=lambda part: part[:2]):
        need(len(begin) == len(size) == len(sizes) and all(
            b + n <= of for b, n, of in zip(begin, size, sizes)),
             f"a chunk of {size} at {begin} is not within {sizes}")
        active = [a for a in active if not sizes or a[0][0] + a[1][0] > begin[0]]
        for other, extent in active:
            need(not all(b < o + m and o < b + n for b, n, o, m in zip(
                begin, size, other, extent)),
                 f"chunks at {other} and at {begin} overlap")
        active.append((begin, size))
    held, numel = sum(math.prod(size) for _, size, _ in parts), math.prod(sizes)
    need(held == numel, f"chunks have {held} of {numel} numbers: there is a gap")


def member(values, key, kind):
    """What a dict has under a key, where None stands for nothing."""
    need(isinstance(values, dict), "expected a dict")
    value = values.get(key)
    value = kind() if value is None else value
    need(isinstance(value, kind), f"{key}: expected a {kind.__name__}")
    return value


class UniversalFolder:
    """What DeepSpeed's ds_to_universal.py writes."""

    def __init__(self, folder):
        self.zero = os.path.join(folder, "zero")
        self.shapes, self.frozen, self.buffers, self.shared = {}, [], {}, {}
        for name in ("mp_rank_00_model_states.pt",
                     "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            path = os.path.join(folder, name)
            if os.path.lexists(path):
                self.read_model_states(path)
                break

    def read_model_states(self, path):
        archive = Archive(path)
        with naming(path):
            root = archive.root
            for group in member(root, "param_shapes", list):
                self.shapes.update(member({0: group}, 0, dict))
            self.frozen = list(member(root, "frozen_param_shapes", dict))
            self.shared = member(root, "shared_params", dict)
            need(all(isinstance(name, str) for pair in self.shared.items()
                     for name in pair), "shared_params: expected names")
            names = {f"module.{name}" for name in member(root, "buffer_names", list)}
        for name, tensor in archive.tensors():
            if tensor and name in names:
                self.buffers[name[len("module."):]] = functools.partial(whole, tensor)

    def __iter__(self):
        seen = dict(self.buffers)
        for entry in sorted(os.scandir(self.zero), key=lambda entry: entry.name):
            need(not entry.is_symlink(), f"{entry.path}: is a link")
            # zero has a float32 copy of a buffer as well, whatever its dtype.
            if not entry.is_dir() or entry.name in self.buffers:
                continue
            for file in sorted(os.listdir(entry.path)):
                load = functools.partial(self.load, os.path.join(entry.path, file),
                                         entry.name)
                if file == "fp32.pt":
                    seen[entry.name] = load
                elif file.endswith(".pt"):
                    yield f"optim.state.{entry.name}.{file[:-3]}", load
        for alias, name in self.shared.items():
            if name in seen:
                # zero may have one of these, made of the 16-bit value.
                seen[alias] = seen[name]
        for name in [*self.shapes, *self.frozen]:
            need(name in seen, f"{self.zero}: has no {shown(name)} (frozen ones of "
                 "stage 3 are not there): take what zero_to_fp32.py writes")
        yield from seen.items()

    def load(self, path, name):
        archive = Archive(path)
        tensor = archive.root
        with naming(path):
            if isinstance(tensor, dict):
                return whole(tensor.get("param"))
            if not isinstance(tensor, Tensor):
                return None  # the number of steps
            if not tensor.sizes:
                return whole(tensor)
            # Of stage 3: flat, as the ranks held it.
            need(name in self.shapes, "is flat, and no *_model_states.pt of the folder "
                 "has its shape: copy that there")
            sizes = counts(self.shapes[name], "shape")
            need(math.prod(sizes) == tensor.sizes[0] and tensor.strides == (1,),
                 f"expected {sizes} numbers, got {tensor.sizes}")
            return whole(tensor._replace(sizes=sizes, strides=row_major(sizes)))


def contents(path):
    if not os.path.isdir(path):
        return in_archive(Archive(path, follow=True))
    if os.path.lexists(os.path.join(path, ".metadata")):
        return DcpFolder(path)
    if os.path.lexists(os.path.join(path, "zero")):
        return UniversalFolder(path)
    paths = sorted(glob.glob(os.path.join(glob.escape(path), "pytorch_model*.bin")))
    need(paths, f"{path}: expected a file of torch.save, or a folder with .metadata, "
         "zero/ or pytorch_model*.bin")
    return in_bin_files(path, paths)