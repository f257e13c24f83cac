#!/usr/bin/python3
"""PyTorch's and DeepSpeed's checkpoints as one safetensors file, without torch.

IN is
  a file of torch.save (.pt, .bin), or a folder with pytorch_model*.bin;
  a folder of torch.distributed.checkpoint (.metadata, *.distcp);
  DeepSpeed's universal checkpoint (zero/NAME/fp32.pt, *_model_states.pt).
Pickles in it are read, not run: what names a class other than those of tensors
is refused, so IN may come from anybody. dtypes stay, views become contiguous.
Of what was saved contiguous 1 MiB is held at a time, of other tensors one whole.

Names are those of the state dict, nested ones joined by dots. With --prefix the
names that begin with it are taken, and it is cut off. Without, all are, except
optimizer states: those below optim. or optimizer., or of exp_avg and the like. A
prefix may name them (--prefix optim.state.); those of a universal folder are
optim.state.NAME.exp_avg. The last line says what was left out.
"""

import argparse
import contextlib
import json
import math
import os
import re
import signal
import sys
import zlib

from torch_archive import (SIZES, Refused, Tensor, check_crc, naming, need, row_major,
                           shown)
from torch_folders import DcpFolder, contents

BLOCK = 1 << 20
MAX_HEADER = 100_000_000  # bytes that readers of safetensors accept
OPTIMIZER = re.compile(
    r"([^.]+\.)?optim(izers?)?(_states?(_dict)?)?\.|state\.\d+\."
    r"|.*\.(exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer)$", re.DOTALL)


# ---- Elements ----

def places(dims, a=0, b=0):
    """Of dims (size, stride, other stride): both offsets of each element."""
    if not dims:
        yield a, b
        return
    for i in range(dims[0][0]):
        yield from places(dims[1:], a + i * dims[0][1], b + i * dims[0][2])


def rearranged(data, item, sizes, strides):
    """The bytes of a view in row-major order."""
    kind = {1: "B", 2: "H", 4: "I", 8: "Q"}[item]
    out = bytearray(math.prod(sizes) * item)
    source, target = memoryview(data).cast(kind), memoryview(out).cast(kind)
    dims = [d for d in zip(sizes, strides, row_major(sizes)) if d[0] > 1]
    # A whole dim at a time, the longest one.
    n, step, to = longest = max((d for d in dims if d[1]), default=(1, 1, 1))
    for at, begin in places([d for d in dims if d is not longest]):
        target[begin:begin + (n - 1) * to + 1:to] = (
            source[at:at + (n - 1) * step + 1:step])
    return out


def blocks(tensor):
    """The bytes of its elements in row-major order. What is not contiguous is
    held whole. The checksum covers a storage, so a part of one has none."""
    item, entry = SIZES[tensor.dtype], tensor.entry
    if not math.prod(tensor.sizes):
        return
    dims = list(zip(tensor.sizes, tensor.strides, row_major(tensor.sizes)))
    plain = all(stride == to for n, stride, to in dims if n > 1)
    span = item * (1 + sum((n - 1) * stride for n, stride, _ in dims))
    step, crc = BLOCK if plain else span, 0
    with contextlib.closing(tensor.archive.open()) as part, naming(tensor.archive.path):
        for at in range(0, span, step):
            data = part.read_all(entry.begin + tensor.offset * item + at,
                                 min(step, span - at))
            crc = zlib.crc32(data, crc)
            yield data if plain else rearranged(data, item, tensor.sizes,
                                                tensor.strides)
        if span == entry.size:
            check_crc(entry, crc)


# ---- What is taken ----

def select(found, prefix):
    """Values by name, and what to say of the others."""
    taken, states, plain, others = {}, [], 0, []
    for name, load in found:
        if prefix and not name.startswith(prefix):
            others.append(name)
        elif load is None:
            plain += 1
        elif prefix is None and OPTIMIZER.match(name):
            states.append(name)
        else:
            with naming(shown(name)):
                name, value = name[len(prefix or ""):], load()
                need(name and name not in taken, "expected a name of its own")
                if value:
                    taken[name] = value
                plain += not value
    kinds = sorted({name.rpartition(".")[2] for name in states})
    left = [f"{len(states)} optimizer states ({', '.join(map(shown, kinds[:8]))})"
            ] * bool(states) + [f"{plain} values that are no tensors"] * bool(plain)
    if others:
        left.append(f"{len(others)} names without the prefix")
    need(taken, "there is no tensor to take; left out: " + (", ".join(left) or "none")
         + "".join(f"; a name is {shown(name)}" for name in (others + states)[:1]))
    return taken, ", ".join(left) or "nothing"


# ---- What is written ----

def header_of(taken):
    """The names in the order of the file, and its head."""
    # The larger numbers first: each tensor is then aligned.
    names = sorted(taken, key=lambda name: (-SIZES[taken[name].dtype], name))
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name in names:
        need(name not in header, f"{shown(name)}: is a name safetensors do not have")
        value = taken[name]
        end = at + math.prod(value.sizes) * SIZES[value.dtype]
        header[name] = {"dtype": value.dtype, "shape": value.sizes,
                        "data_offsets": [at, end]}
        at = end
    try:
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise Refused("has a name that is not Unicode") from None
    text += b" " * (-len(text) % 8)
    need(len(text) <= MAX_HEADER, f"its names need {len(text)} bytes, and readers take "
         f"{MAX_HEADER}")
    return names, len(text).to_bytes(8, "little") + text, at


def write_part(file, base, value, begin, sizes, data):
    """The blocks `data` of a chunk to where its rows are in the whole."""
    item, strides = SIZES[value.dtype], row_major(value.sizes)
    outer, run = len(sizes), 1  # the dims before `outer` jump
    while outer and (outer == len(sizes) or sizes[outer] == value.sizes[outer]):
        outer -= 1
        run *= sizes[outer]
    rows = places([(n, stride, 0) for n, stride in zip(sizes[:outer], strides)],
                  sum(b * stride for b, stride in zip(begin, strides)))
    left = 0
    for block in data:
        block = memoryview(block)
        while block:
            if not left:
                file.seek(base + next(rows)[0] * item)
                left = run * item
            n = min(left, len(block))
            file.write(block[:n])
            block, left = block[n:], left - n


def write_values(file, taken):
    names, head, size = header_of(taken)
    room = os.fstatvfs(file.fileno())
    need(not room.f_blocks or size + len(head) <= room.f_bavail * room.f_frsize,
         f"{size} bytes are to be written, {room.f_bavail * room.f_frsize} are free")
    file.write(head)
    base = len(head)
    for name in names:
        value = taken[name]
        with naming(shown(name)):
            for begin, sizes, load in value.parts:
                tensor = load()
                need(isinstance(tensor, Tensor) and tensor.dtype == value.dtype
                     and tensor.sizes == sizes, f"expected {sizes} of {value.dtype} at "
                     f"{begin}, got {getattr(tensor, 'sizes', 'no tensor')}")
                write_part(file, base, value, begin, sizes, blocks(tensor))
        base += math.prod(value.sizes) * SIZES[value.dtype]
    file.flush()
    need(os.fstat(file.fileno()).st_size == base, "not all was written")
    os.fsync(file.fileno())
    return base


def write_file(out, taken):
    """All of it under its name, or nothing. Never takes another file's place."""
    temporary, folder = f"{out}.{os.getpid()}.tmp", os.path.dirname(out) or "."
    with open(temporary, "xb") as file:
        try:
            size = write_values(file, taken)
            try:
                os.link(temporary, out)
                os.unlink(temporary)
            except PermissionError:  # a file system without hard links
                need(not os.path.lexists(out), f"{out}: exists already")
                os.rename(temporary, out)
        except BaseException:
            os.unlink(temporary)
            raise
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return size


def run(options):
    need(not os.path.lexists(options.out), f"{options.out}: exists already")
    found = contents(options.input)
    with naming(options.input):
        taken, left = select(found, options.prefix)
        if isinstance(found, DcpFolder):
            found.check_used()
        size = write_file(options.out, taken)
    print(f"{options.out}: {len(taken)} tensors, {size} bytes; left out: {left}")


def main(args=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", metavar="IN")
    parser.add_argument("out", metavar="OUT.safetensors", help="a new file")
    parser.add_argument("--prefix", metavar="NAME.", help="such as model.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        run(parser.parse_args(args))
    except (Refused, OSError, MemoryError, RecursionError) as error:
        text = str(error) or type(error).__name__
        sys.exit("torch_to_safetensors: " + "".join(
            c if c.isprintable() else ascii(c)[1:-1] for c in text))


if __name__ == "__main__":
    main()
