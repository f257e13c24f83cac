"""The row of checkpoints: benchmarks/checkpoint and checkpoint_peer.py in turns.

Every operation is a turn, in another order each round, so that a ratio is of
turns that were seconds apart. The first round warms up and is not counted.
"""
import os
import random
import shutil
import tempfile

import outcome
import peer_env
import ratios
import turns

WORLD = 2
LOADERS = 3
DCP = 'dcp_'
OPERATIONS = ('save', 'write', 'save_async', 'copy_fresh', 'copy_huge',
              'copy_warm', 'load', 'load_cold', 'read_cold')
DCP_OPERATIONS = ('save', 'save_async', 'load', 'load_cold', 'resume')


def ranks(row, bench, folder, world):
    """The command of benchmarks/checkpoint in turns."""
    return ('checkpoint', [bench.checkpoint, '--turns', *model(row, folder)],
            world, {})


def model(row, folder):
    return ['--dir', folder, '--dim', str(row.model.dim),
            '--layers', str(row.model.layers)]


def dcp(row, bench, folder):
    here = os.path.dirname(os.path.abspath(__file__))
    program = os.path.join(here, 'checkpoint_peer.py')
    return ('DCP', [peer_env.PYTHON, program, *model(row, folder)], WORLD,
            bench.peers)


def turn(training, operation):
    training.tell(operation)
    return training.answer()


def measure(row, bench):
    result = outcome.Result(row)
    folder = tempfile.mkdtemp(prefix='checkpoints.', dir=bench.disk or
                              bench.folder)
    try:
        taken, memory, state = in_turns(row, bench, folder)
        read = {f'reshard_{world}_to_3': resharded(row, bench, folder, world)
                for world in (2, 4)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    for goal in row.goals:
        result.lines.append(line_of(goal, taken, memory, read, state))
    result.raw = {'ms': {name: [round(ms, 3) for ms in all_ms]
                         for name, all_ms in taken.items()},
                  'peak_bytes': memory, 'bytes_read': read,
                  'state_bytes': state}
    notes(result, state)
    return result


def in_turns(row, bench, folder):
    """(milliseconds, peaks of memory) by operation, and bytes of the state."""
    commands = [ranks(row, bench, folder, WORLD), dcp(row, bench, folder)]
    with turns.trainings(commands, turns.environment()) as (ours, theirs):
        # The first of ours is a save: it says how many bytes are written.
        order = [(name, ours, name) for name in OPERATIONS]
        order += [(DCP + name, theirs, name) for name in DCP_OPERATIONS]
        for _, training, operation in order:
            turn(training, operation)
        taken = {name: [] for name, _, _ in order}
        memory = {name: [] for name in ('save', 'save_async')}
        shuffled, state = random.Random(1), 0
        for _ in range(bench.rounds):
            shuffled.shuffle(order)
            for name, training, operation in order:
                answer = turn(training, operation)
                taken[name].append(answer['ms'])
                if name in memory:
                    memory[name].append(answer['peak_bytes'])
                    state = answer['state_bytes']
        for training in (ours, theirs):
            training.end()
    return taken, memory, state


def resharded(row, bench, folder, world):
    """The bytes that LOADERS ranks read of what `world` have saved."""
    def run(number, operation):
        command = ranks(row, bench, folder, number)
        with turns.trainings([command], turns.environment()) as (training,):
            answer = turn(training, operation)
            training.end()
            return answer
    run(world, 'save')
    return run(LOADERS, 'load')['bytes']


def line_of(goal, taken, memory, read, state):
    if goal.what in ('memory', 'bytes'):
        ours = memory[goal.ours] if goal.what == 'memory' else [read[goal.ours]]
        ratio = ratios.Spread([value / state for value in ours],
                              goal.at_least, goal.at_most)
        return outcome.Line(goal, ratio, [value / 1e6 for value in ours],
                            [state / 1e6])
    ours, theirs = taken[goal.ours], taken[goal.against]
    pairs = zip(ours, theirs)
    values = [a / b if goal.what == 'stall' else b / a for a, b in pairs]
    return outcome.Line(goal, ratios.Ratio(values, goal.at_least, goal.at_most),
                        ours, theirs)


def notes(result, state):
    result.notes += [
        f'Masters and states of {WORLD} ranks: {state / 1e6:.1f} MB. Each turn '
        'begins when the disk has taken all that came before, and ends when all '
        'ranks have. Saves go to a folder that was removed, plain writes too; '
        'DCP has FSDP2 tensors, and loads into those that are there, whose '
        'memory is touched; in "a new optimizer" it makes the states first, as '
        'a program does that begins anew. Ours loads into a new engine always, '
        'whose memory for states is not touched.',
        'stall: SaveCheckpoint and a change of a master directly behind it, '
        'for which all is copied: the longest that there can be. Its bound is '
        'the copy into memory fresh from the kernel, as malloc gets it: a copy '
        'must have its memory. Of DCP: until async_save returns.',
        'speed: of loads from the caches of the system, except where it says '
        'from the disk.',
        'memory: the largest resident set during a save, beyond that before '
        'it; nothing is kept that was freed; all ranks.']
