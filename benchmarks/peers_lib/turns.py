"""Trainings that take turns: all are loaded at once, one runs at a time.

So a ratio of two of them is of steps that ran seconds apart, and what the
machine does meanwhile meets both.
"""
import contextlib
import json
import os
import socket
import subprocess
import tempfile
import threading
import time

TURN_LIMIT = 600  # seconds that one turn, or the start, may take
SAMPLE_EVERY = 0.05  # seconds between samples of memory


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def pss_bytes(pid):
    """Proportional set size: shared pages count in equal parts."""
    with open(f'/proc/{pid}/smaps_rollup') as rollup:
        for line in rollup:
            if line.startswith('Pss:'):
                return int(line.split()[1]) << 10
    return 0


class Training:
    """The ranks of one training: `command` once for each of `world`."""

    def __init__(self, name, command, world, environment):
        self.name, self.world = name, world
        self.log = tempfile.TemporaryFile()
        port = str(free_port())
        self.ranks = []
        for rank in range(world):
            self.ranks.append(subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.log, text=True, env={
                    **environment, 'OMP_NUM_THREADS': '1', 'RANK': str(rank),
                    'LOCAL_RANK': str(rank), 'WORLD_SIZE': str(world),
                    'LOCAL_WORLD_SIZE': str(world),
                    'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}))
        self.baseline = self.peak = 0  # bytes of memory, all ranks
        self.losses = []
        self.answer()  # loaded
        self.baseline = self.memory()
        self.tell('')

    def memory(self):
        return sum(pss_bytes(rank.pid) for rank in self.ranks)

    def tell(self, line):
        try:
            for rank in self.ranks:
                rank.stdin.write(f'{line}\n')
                rank.stdin.flush()
        except BrokenPipeError:
            self.fail('ended early')

    def answer(self):
        timer = threading.Timer(TURN_LIMIT, self.kill)
        timer.start()
        line = self.ranks[0].stdout.readline()
        timer.cancel()
        if not line.startswith('{'):
            self.fail(f'said {line!r} instead of a line of JSON')
        return json.loads(line)

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
                self.peak = max(self.peak, self.memory())
        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            return self.turn(steps)
        finally:
            done.set()
            sampler.join()

    def end(self):
        """What benchmarks/train says at its end, {} of the others."""
        for rank in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.close()
        text = self.ranks[0].stdout.read()
        for rank in self.ranks:
            rank.wait(60)
            if rank.returncode != 0:
                self.fail(f'a rank ended with {rank.returncode}')
        return json.loads(text) if text.startswith('{') else {}

    def kill(self):
        for rank in self.ranks:
            rank.kill()

    def fail(self, what):
        self.kill()
        time.sleep(0.1)
        self.log.seek(0)
        last = self.log.read().decode(errors='replace').splitlines()[-15:]
        raise SystemExit('\n'.join([f'peers: {self.name} {what}', *last]))


@contextlib.contextmanager
def trainings(commands, environment):
    """`commands`: (name, command, world, additions to the environment)."""
    started = []
    try:
        for name, command, world, more in commands:
            started.append(
                Training(name, command, world, {**environment, **more}))
        yield started
    finally:
        for training in started:
            training.kill()
            for rank in training.ranks:
                rank.wait()


def interleave(started, warm_up, steps, rounds):
    """By name, the milliseconds of each turn: [rounds][steps]."""
    for training in started:
        training.turn(warm_up)
    turns = {training.name: [] for training in started}
    for i in range(rounds):
        # There and back, so that nobody always follows the same one.
        for training in started if i % 2 == 0 else reversed(started):
            turns[training.name].append(training.turn(steps))
    return turns


def environment():
    keep = ('PATH', 'HOME', 'TMPDIR', 'LD_LIBRARY_PATH', 'CUDA_HOME',
            'XDG_CACHE_HOME')
    return {name: os.environ[name] for name in keep if name in os.environ}
