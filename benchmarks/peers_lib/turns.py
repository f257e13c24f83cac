"""Trainings that take turns: all are loaded at once, one runs at a time.

So a ratio of two of them is of steps that ran seconds apart, and what the
machine does meanwhile meets both.
"""
import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time

PROGRAM = 'peers'  # who asks, for messages
TURN_LIMIT = 600  # seconds that one turn, or the start, may take
END_LIMIT = 60  # seconds that the ranks may take to end
SAMPLE_EVERY = 0.05  # seconds between samples of memory
LOOK_EVERY = 0.2  # seconds between looks at the other ranks
QUIET = 0.5  # seconds without a transfer, after which a disk is at rest
QUIET_LIMIT = 120  # seconds to wait for that
LAST_LINES = 15  # of what a failed training wrote


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def pss_bytes(pid):
    """Proportional set size: shared pages count in equal parts."""
    with open(f'/proc/{pid}/smaps_rollup', encoding='ascii') as rollup:
        for line in rollup:
            if line.startswith('Pss:'):
                return int(line.split()[1]) << 10
    return 0


def bytes_moved(pid):
    """What a process has read from disks and written there, since it began."""
    with open(f'/proc/{pid}/io', encoding='ascii') as counters:
        fields = dict(line.split(': ') for line in counters)
    return int(fields['read_bytes']), int(fields['write_bytes'])


class Training:
    """The ranks of one training: `command` once for each of `world`."""

    def __init__(self, name, command, world, environment):
        self.name, self.world = name, world
        self.command, self.environment = command, environment
        self.log = tempfile.TemporaryFile()
        self.ranks = []
        self.unread = []  # of each rank's output
        self.baseline = self.peak = 0  # bytes of memory, all ranks
        self.losses = []

    def begin(self):
        """Starts it, waits for its libraries, lets it build its model."""
        port = str(free_port())
        for rank in range(self.world):
            # A session of its own: what it starts can be ended with it.
            self.ranks.append(subprocess.Popen(
                self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.log, start_new_session=True, env={
                    **self.environment,
                    'RANK': str(rank), 'LOCAL_RANK': str(rank),
                    'WORLD_SIZE': str(self.world),
                    'LOCAL_WORLD_SIZE': str(self.world),
                    'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}))
        self.unread = [b''] * self.world
        self.answer()
        self.baseline = self.memory()
        self.tell('')

    def memory(self):
        return sum(pss_bytes(rank.pid) for rank in self.ranks)

    def tell(self, line):
        try:
            for rank in self.ranks:
                rank.stdin.write(f'{line}\n'.encode())
                rank.stdin.flush()
        except BrokenPipeError:
            self.fail(f'lost rank {self.ranks.index(rank)}')

    def answer(self):
        """Rank 0's, when all ranks have answered: nobody still works then."""
        deadline = time.monotonic() + TURN_LIMIT
        lines = [self.next_line(rank, deadline) for rank in range(self.world)]
        try:
            return [json.loads(line) for line in lines][0]
        except ValueError:
            self.fail(f'said {lines!r} instead of lines of JSON')

    def next_line(self, rank, deadline):
        out = self.ranks[rank].stdout.fileno()
        while b'\n' not in self.unread[rank]:
            # Before the look at the output: nothing comes after it then. The
            # output's end is no sign, since what a rank started has it too.
            dead = [(i, process.returncode)
                    for i, process in enumerate(self.ranks)
                    if process.poll() is not None]
            said = b''
            if select.select([out], [], [], 0 if dead else LOOK_EVERY)[0]:
                said = os.read(out, 1 << 16)
            self.unread[rank] += said
            if dead and not said:
                self.fail('lost rank %d, which ended with %d' % dead[0])
            if time.monotonic() > deadline:
                self.fail(f'did not answer for {TURN_LIMIT} seconds')
        line, _, self.unread[rank] = self.unread[rank].partition(b'\n')
        return line.decode(errors='replace')

    def turn(self, steps):
        """The milliseconds of `steps` steps, without those of the warm-up."""
        self.tell(steps)
        answer = self.answer()
        self.losses += answer['loss']
        return answer['ms']

    def watched_turn(self, steps):
        """The same, while the memory of all ranks is sampled."""
        done = threading.Event()

        def sample():
            while not done.wait(SAMPLE_EVERY):
                with contextlib.suppress(OSError):  # a rank has ended
                    self.peak = max(self.peak, self.memory())
        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            return self.turn(steps)
        finally:
            done.set()
            sampler.join()

    def moved(self):
        """Bytes read and written by each rank."""
        return [bytes_moved(rank.pid) for rank in self.ranks]

    def settle(self):
        """Waits until the disk has all that it began to write, behind its last
        step, and nothing is read ahead."""
        deadline = time.monotonic() + QUIET_LIMIT
        before = None
        while (now := self.moved()) != before:
            if time.monotonic() > deadline:
                self.fail(f'still reads or writes after {QUIET_LIMIT} seconds')
            before = now
            time.sleep(QUIET)

    def end(self):
        """What benchmarks/train says at its end, {} of the others."""
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        timer = threading.Timer(END_LIMIT, self.signal)
        timer.start()
        texts = [unread + rank.stdout.read()
                 for unread, rank in zip(self.unread, self.ranks)]
        codes = [rank.wait() for rank in self.ranks]
        timer.cancel()
        for rank, code in enumerate(codes):
            if code != 0:
                self.fail(f'had a rank {rank} that ended with {code}')
        self.kill()
        return json.loads(texts[0]) if texts[0].startswith(b'{') else {}

    def signal(self):
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)

    def kill(self):
        """All ranks, and all that they started."""
        self.signal()
        for rank in self.ranks:
            rank.wait()
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
            rank.stdout.close()
        self.ranks = []

    def fail(self, what):
        self.kill()
        self.log.seek(0)
        last = self.log.read().decode(errors='replace').splitlines()
        raise SystemExit('\n'.join(
            [f'{PROGRAM}: {self.name} {what}; its last lines:',
             *(last[-LAST_LINES:] or ['(none)'])]))


@contextlib.contextmanager
def trainings(commands, environment):
    """`commands`: (name, command, world, additions to the environment)."""
    started = []
    try:
        for name, command, world, more in commands:
            started.append(
                Training(name, command, world, {
                    **environment, 'OMP_NUM_THREADS': '1', **more}))
            started[-1].begin()
        yield started
    finally:
        for training in started:
            training.kill()
            training.log.close()


def interleave(started, steps, rounds, uncounted=0):
    """By name, the milliseconds of each turn: [rounds][steps]. Without those of
    its first `uncounted`, if there are any; the disk is at rest before each then.
    """
    turns = {training.name: [] for training in started}
    # In another order each time, so that nobody always follows the same one.
    order, shuffled = list(started), random.Random(1)
    for _ in range(rounds):
        shuffled.shuffle(order)
        for training in order:
            turns[training.name].append(training.turn(steps)[uncounted:])
            if uncounted:
                training.settle()
    return turns


def environment():
    keep = ('PATH', 'HOME', 'TMPDIR', 'LD_LIBRARY_PATH', 'CUDA_HOME',
            'XDG_CACHE_HOME')
    return {name: os.environ[name] for name in keep if name in os.environ}
