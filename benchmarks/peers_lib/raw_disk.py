"""What a disk gives those who only read and write: one rank of it.

A file of its own in a folder, blocks of 1 MiB, 8 under way at a time of each
kind, O_DIRECT. It takes turns as benchmarks/train does; a turn is the bytes to
read and those to write, "1000000 0": both are done at once. The file is as long
as the largest turn so far; it grows before its first use, which is not to be
timed. RANK says which.
"""
import argparse
import json
import mmap
import os
import sys
import threading

BLOCK = 1 << 20
DEPTH = 8


class File:
    def __init__(self, folder, rank):
        path = os.path.join(folder, f'raw.{rank}')
        self.file = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC,
            0o600)
        os.unlink(path)
        self.blocks = 0
        # Page by page memory of a disk's alignment, that no disk can compress.
        self.memory = [mmap.mmap(-1, BLOCK) for _ in range(2 * DEPTH)]
        for memory in self.memory:
            memory[:] = os.urandom(BLOCK)

    def grow(self, blocks):
        if blocks > self.blocks:
            os.posix_fallocate(self.file, 0, blocks * BLOCK)
            self.move(0, blocks, grown=blocks)
            os.fsync(self.file)
            self.blocks = blocks

    def move(self, reads, writes, grown=None):
        """Reads so many blocks from the file's begin, and writes so many from its
        middle on."""
        length = grown or self.blocks
        errors = []

        def work(call, memory, blocks):
            try:
                for block in blocks:
                    done = call(self.file, [memory], block % length * BLOCK)
                    if done != BLOCK:
                        raise OSError(f'{done} bytes of {BLOCK} of block {block}')
            except OSError as error:
                errors.append(error)
        threads = [threading.Thread(target=work, args=args)
                   for i in range(DEPTH) for args in
                   ((os.preadv, self.memory[i], range(i, reads, DEPTH)),
                    (os.pwritev, self.memory[DEPTH + i],
                     range(length // 2 + i, length // 2 + writes, DEPTH)))
                   if args[2]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--folder', required=True)
    options = parser.parse_args()

    def say():
        print(json.dumps({'ms': [], 'loss': []}), flush=True)

    say()
    sys.stdin.readline()
    try:
        file = File(options.folder, os.environ['RANK'])
        for line in sys.stdin:
            # Up to the next block.
            reads, writes = (-(-int(n) // BLOCK) for n in line.split())
            file.grow(max(reads, writes))
            file.move(reads, writes)
            say()
    except OSError as error:
        sys.exit(f'{options.folder}: {error} (O_DIRECT needs a disk: no tmpfs)')


if __name__ == '__main__':
    main()
