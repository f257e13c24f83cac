"""Runs the rows of rows.py; each gives a Result."""
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import tempfile

import checkpoints
import losses
import peer_env
import ratios
import rows
import turns
from outcome import Line, Result

WORLD = 2
REPETITIONS = 3  # of a measurement of memory
NUDGES = 3  # trainings from nudged weights
PEERS = ('ddp', 'fsdp1', 'fsdp2', 'ds1', 'ds2', 'ds3')
EXACT_PEERS = ('ddp', 'fsdp2')


def run(row, bench):
    if bench.small and row.model is not None:
        model = rows.SMALL_ON_DISK if row.kind == 'offload' else rows.SMALL
        row = dataclasses.replace(row, model=model, loss_steps=10)
    if bench.loss_steps:
        row = dataclasses.replace(
            row, loss_steps=min(row.loss_steps, bench.loss_steps))
    kinds = {'speed': speed, 'memory': memory, 'offload': offload,
             'optimizers': optimizers, 'collectives': collectives,
             'checkpoint': checkpoints.measure}
    return kinds[row.kind](row, bench)


def command(side, row, bench, init):
    """(name, command, world, additions to the environment) of a training."""
    options = [*row.model.options(), '--data', bench.data]
    if row.clip:
        options += ['--clip', str(row.clip)]
    for variant, flag in (('_nvme', '--states_on_disk'),
                          ('_nvmep', '--parameters_on_disk')):
        if side.endswith(variant):
            options += [flag, os.path.join(bench.disk or bench.folder, side)]
    world = 4 if side.endswith('_of_4') else WORLD
    if side.startswith('stage') or side == 'none':
        options += ['--dtype', 'bf16' if row.bf16 else 'fp32', '--turns']
        if side == 'none':
            options += ['--engine', 'none']
        else:
            options += ['--stage', side[5], '--init', init]
        if side.endswith('_ckpt'):
            options += ['--recompute', 'full']
        elif side.endswith('_selective'):
            options += ['--recompute', 'selective']
        return side, [bench.train, *options], world, {}
    options += ['--engine', rows.engine_of(side)] + ['--bf16'] * row.bf16
    options += ['--ckpt'] * side.endswith('_ckpt')
    return (side, [*trainer(), *options], world, bench.peers)


def trainer():
    here = os.path.dirname(os.path.abspath(__file__))
    return [peer_env.PYTHON, os.path.join(here, 'train_peer.py')]


def said_by(words, more):
    """Its output, while nothing else runs."""
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**turns.environment(), **more})
    try:
        out, errors = process.communicate()
    finally:  # its compilers too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode != 0:
        last = (errors or out).splitlines()[-turns.LAST_LINES:]
        raise SystemExit('\n'.join(
            [f'peers: {os.path.basename(words[0])} ended with '
             f'{process.returncode}; its last lines:', *last]))
    return out


# ---- speed


def initial_weights(row, bench, nudges=0):
    """A file of the weights that all begin with, and a list of those nudged."""
    init = os.path.join(bench.folder, f'{row.name}.init')
    nudged = [os.path.join(bench.folder, f'{row.name}.nudged{i}')
              for i in range(nudges)]
    said_by([*trainer(), '--engine', 'single', '--data', bench.data,
             *row.model.options(), *['--bf16'] * row.bf16,
             '--save_init', init, '--save_nudged', *nudged], bench.peers)
    return init, nudged


def losses_from(file, row, bench):
    """Our own, from those weights, which are removed."""
    one = command('stage3', row, bench, file)
    with turns.trainings([one], turns.environment()) as (training,):
        training.turn(row.loss_steps)
    os.remove(file)
    return training.losses


def memory_available():
    with open('/proc/meminfo', encoding='ascii') as file:
        for line in file:
            if line.startswith('MemAvailable:'):
                return int(line.split()[1]) << 10
    return 0


def groups_of(row):
    """The goals of each run: all in one, or one each where memory is short."""
    need = sum((rows.bytes_per_parameter(side) * row.model.numel
                + rows.BYTES_OF_LIBRARIES)
               * (4 if side.endswith('_of_4') else WORLD) for side in row.sides)
    if need <= 0.9 * memory_available():
        return [row.goals]
    return [(goal,) for goal in row.goals]


def comparable(side):
    """Whether its losses are those of the reference: the same batches, summed
    over the same ranks."""
    return side != 'none' and not side.endswith('_of_4')


def compare_losses(started, reference, limits, result):
    """Bits must be equal at any stage of ours, and those of EXACT_PEERS, which
    run the same operations, except for the norm that they clip by: that they sum up
    in another order."""
    for training in started:
        name, theirs, ours = training.name, training.losses, reference
        if theirs is ours:
            continue
        if not comparable(name):  # no more than the first batch is the same
            theirs, ours = theirs[:1], ours[:1]
        exact = not comparable(name) or name.startswith('stage') or (
            rows.engine_of(name) in EXACT_PEERS and not result.row.clip)
        verdict = losses.Verdict(ours, theirs, None if exact else limits)
        result.notes.append(f'Losses of {rows.TITLES[name]} and of '
                            f'ours: {verdict.text}.')
        result.failed |= not verdict.ok


def speed(row, bench):
    result = Result(row)
    # Peers may differ from ours.
    inexact = any(rows.engine_of(side) in PEERS for side in row.sides)
    init, nudged = initial_weights(row, bench, NUDGES if inexact else 0)
    off = [losses_from(file, row, bench) for file in nudged]
    groups = groups_of(row)
    if len(groups) > 1:
        result.notes.append('In pairs, since memory is short for all at once.')
    for goals in groups:
        group = dataclasses.replace(row, goals=tuple(goals))
        commands = [command(side, row, bench, init) for side in group.sides]
        with turns.trainings(commands, turns.environment()) as started:
            speed_of(group, bench, started, off, result)
        if result.failed:
            break
    os.remove(init)
    return result


def speed_of(row, bench, started, off, result):
    for training in started:
        training.turn(row.loss_steps)
    reference = next(t for t in started
                     if rows.engine_of(t.name) in ('stage3', 'stage0')).losses
    compare_losses(started, reference, losses.bounds(reference, off), result)
    if result.failed:
        return
    measured = turns.interleave(started, row.steps, bench.rounds, row.uncounted)
    for goal in row.goals:
        result.lines.append(line_of(goal, measured))
    note_bounds(measured, result)
    key = 'turns' if 'turns' not in result.raw else f'turns {row.sides[-1]}'
    result.raw[key] = {side: [[round(ms, 3) for ms in turn] for turn in taken]
                       for side, taken in measured.items()}
    for training in started:
        end = training.end()
        if training.name == 'stage3' and 'bytes_at_peak' not in result.raw:
            note_memory(row, end, result)


def line_of(goal, measured):
    ours, theirs = measured[goal.ours], measured[goal.against]
    if goal.what == 'step time':
        values = ratios.of_turns(ours, theirs)
    else:
        ranks = 2 if goal.ours.endswith('_of_4') else 1  # tokens of a step
        values = [ranks * value for value in ratios.of_turns(theirs, ours)]
    return Line(goal, ratios.Ratio(values, goal.at_least, goal.at_most),
                sum(ours, []), sum(theirs, []))


def note_bounds(measured, result):
    """How far ahead of the peers one is who does not communicate at all."""
    if 'none' not in measured:
        return
    said = []
    for side in measured:
        if side in PEERS:
            ratio = ratios.Ratio(ratios.of_turns(measured[side],
                                                 measured['none']))
            said.append(f'{ratio.median:.3f} ({ratio.low:.3f} to '
                        f'{ratio.high:.3f}) of {rows.TITLES[side]}')
    if said:
        result.notes.append('No communication has, in tokens/s, '
                            + ', '.join(said) + '.')


def note_memory(row, end, result):
    """What `end` says a rank held, and the bound of its gradients."""
    if end['params'] != row.model.numel:
        raise SystemExit(f'peers: row {row.name}: the model has {end["params"]} '
                         f'parameters, expected {row.model.numel}')
    held = result.raw['bytes_at_peak'] = end['bytes_at_peak']
    unit = max(int(re.search(r': \d+ parameters, (\d+) elements', unit)[1])
               for unit in end['units'])
    bound = 4 * (row.model.numel // WORLD + 2 * unit)
    inside = held['gradients'] <= bound
    words = ', '.join(f'{kind} {held[kind]:,}'
                      for kind in ('parameters', 'gradients', 'optimizer'))
    result.notes.append(
        f'Bytes of a rank of ours at their peak: {words}; gradients '
        f'{"<=" if inside else "EXCEED"} a share and two units, {bound:,}.')
    result.failed |= not inside


# ---- memory


def peak_of(side, row, bench, init):
    """Bytes of a rank beyond those of its libraries."""
    one = command(side, row, bench, init)
    with turns.trainings([one], turns.environment()) as (training,):
        training.watched_turn(row.steps)
        return (training.peak - training.baseline) / training.world


def memory(row, bench):
    result = Result(row)
    init, _ = initial_weights(row, bench)
    peaks = {side: [] for side in row.sides}
    for _ in range(REPETITIONS):
        for side, taken in peaks.items():
            taken.append(peak_of(side, row, bench, init))
    os.remove(init)
    megabytes = {side: [peak / 1e6 for peak in taken]
                 for side, taken in peaks.items()}
    result.raw['peak_mb'] = megabytes
    for goal in row.goals:
        values = [a / b for a, b in zip(peaks[goal.ours], peaks[goal.against])]
        result.lines.append(Line(
            goal, ratios.Spread(values, goal.at_least, goal.at_most),
            megabytes[goal.ours], megabytes[goal.against]))
    result.notes.append(
        f'Peak of the proportional set size, looked at every '
        f'{turns.SAMPLE_EVERY * 1e3:.0f} ms, mean of the ranks, from the '
        f"model's construction to the end of step {row.steps}: parameters, "
        'gradients, optimizer, activations, buffers of communication. Without '
        'what a rank held before, with its libraries loaded and its ranks '
        f'joined. {REPETITIONS} times, one after the other; the interval is '
        'from the least to the largest.')
    return result


# ---- states, or parameters too, on a disk


# Now, since it takes minutes, and a turn has a limit. What is there is kept.
COMPILE = '''from deepspeed.ops.op_builder import AsyncIOBuilder, CPUAdamBuilder
AsyncIOBuilder().load()
CPUAdamBuilder().load()'''


def offload(row, bench):
    """Speed, then memory, of the same sides."""
    said_by([peer_env.PYTHON, '-c', COMPILE], bench.peers)
    def only(wanted):
        return dataclasses.replace(row, goals=tuple(
            goal for goal in row.goals if (goal.what == 'memory') == wanted))
    with tempfile.TemporaryDirectory(prefix='offload.',
                                     dir=bench.disk or bench.folder) as disk:
        bench = dataclasses.replace(bench, disk=disk)
        result = speed(only(False), bench)
        if result.failed:
            return dataclasses.replace(result, row=row)
        held = memory(only(True), bench)
    return Result(row, result.lines + held.lines, result.notes + held.notes,
                  {**result.raw, **held.raw})


# ---- programs that measure by themselves


def optimizers(row, bench):
    result = Result(row)
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    words = [peer_env.PYTHON, os.path.join(here, 'optimizers_peer.py'),
             bench.optimizers, '--rounds', str(bench.rounds)]
    if bench.small:
        words += ['--numel', str(1 << 16)]
    figures = json.loads(said_by(words, bench.peers).splitlines()[-1])
    result.raw = figures
    ms = figures['ms']
    leasts = {'torch': 1.0, 'deepspeed': 1.0, 'triad_16': 0.85}
    for algorithm, over in figures['over'].items():
        for who, least in leasts.items():
            if who not in over:
                continue
            theirs = ms['triad' if who == 'triad_16' else f'{algorithm} {who}']
            result.lines.append(Line(
                rows.Goal(algorithm, who, 'GB/s', at_least=least),
                ratios.Ratio(over[who]['rounds'], at_least=least),
                ms[f'{algorithm} ours'], theirs))
    result.notes.append('triad_16: bytes a second of a = b + s * c, with what '
                        'the processor reads before it writes.')
    return result


def collectives(row, bench):
    result = Result(row)
    size = 1 << 16 if bench.small else 1 << 26
    said = []
    for world in (2, 4):
        text = said_by(
            [bench.collectives, '--world', str(world), '--bytes', str(size),
             '--dtype', 'fp32', '--ops', 'all_gather,reduce_scatter,all_reduce',
             '--backends', 'shm,gloo,copy', '--rounds', str(bench.rounds)], {})
        said += [json.loads(line) for line in text.splitlines()
                 if line.startswith('{')]
    result.raw['collectives'] = said
    for line in said:
        result.notes.append(
            f'W = {line["world"]}, {line["op"]}, {line["backend"]}: '
            f'{line["ms"]:.2f} ms (least {line["ms_min"]:.2f}), '
            f'{line["gb_s"]:.2f} GB/s of the bus.')
    if not said:
        raise SystemExit('peers: benchmarks/collectives said nothing')
    return result
