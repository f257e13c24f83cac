"""What gpu_check runs: a function for each item, which returns its figures.

An item that cannot be run raises Skip, one that fails Failed, one whose time is
over TimedOut; all that its programs write is in its log.
"""
import collections
import glob
import json
import os
import re
import shutil
import statistics
import sys
import time

from gpu_context import HERE, RUN, Failed, Skip

sys.path.insert(0, os.path.join(HERE, 'benchmarks'))
import turns  # noqa: E402 pylint: disable=wrong-import-position

PYTHON = os.environ.get('TESSERA_PYTHON', 'python3')
DATA = os.path.join(HERE, 'LICENSE')  # any text
GPT = ('--data', DATA, '--config', 'examples/gpt/zero3.json', '--dim', '32',
       '--layers', '2', '--heads', '2', '--seq', '16', '--steps', '3', '--json')
# Tests of optim's kernels, and of those of the norm.
KERNELS = 'OptimKernelsGpu.'
NORM = KERNELS + 'Norm*:' + KERNELS + 'Scalars*'
NO_GPU = {'CUDA_VISIBLE_DEVICES': ''}
WARM_UP = 3  # steps before the first round
END_SECONDS = 10  # that trainings may take to end
# TFLOP/s of bfloat16 without sparsity, by NVIDIA's data sheets; the first name
# that is in the GPU's.
PEAKS = (('GH200', 989), ('H200', 989), ('H100 PCIe', 756), ('H100 NVL', 835),
         ('H100', 989), ('B200', 2250), ('A100', 312), ('L40S', 362))
# For sums that are the same in each run.
SAME_BITS = {'CUBLAS_WORKSPACE_CONFIG': ':4096:8'}


def tests(context, *runs, env=None, prefix=()):
    """Of (program, pattern); skipped if nothing passed."""
    figures, total = [], 0
    for program, pattern in runs:
        passed, skipped, why = context.gtest(program, pattern, env, prefix)
        if context.gpu and 'no GPU' in why:
            raise Failed(program + ': the driver has a GPU, libtorch sees none')
        total += passed
        figures.append('%s: %d passed' % (program, passed) + (
            ', %d skipped: %s' % (skipped, why) if skipped else ''))
    if total == 0:
        raise Skip(why if context.gpu else context.no_gpu)
    return figures


def gpu(context):
    """What gpu_check found when it started."""
    if context.wrong:
        raise Failed(context.wrong)
    context.need_gpu()
    return ['%d of them' % context.gpu.count]


def ldd(context):
    """No library is missing, and no version of one."""
    reports = {program: context.run(RUN, 'ldd', program)
               for program in sorted(glob.glob(os.path.join(HERE, 'bin', '*')))}
    # Programs load libtorch's CUDA library themselves where there is a driver.
    for folder in set(re.findall(r'=> (\S+)/libtorch_cpu\.so',
                                 ''.join(reports.values()))):
        path = folder + '/libtorch_cuda.so'
        if os.path.exists(path):
            reports[path] = context.run(RUN, 'ldd', path)
    missing = collections.Counter()
    for path, said in reports.items():
        # The message of a missing version begins with the path of the program.
        missing.update({line.replace(path + ': ', '').strip()
                        for line in said.splitlines() if 'not found' in line})
    if missing:
        raise Failed('; '.join('%s (%d of %d files)' % (
            line, count, len(reports)) for line, count in missing.items()))
    return ['%d programs and libraries, nothing missing' % len(reports)]


def tools(context):
    said = context.run(RUN, 'tessera', 'config', 'check',
                       'examples/gpt/zero3.json', '--world', '2')
    context.run(RUN, 'tessera', 'plan', '--help')
    return ['tessera config check: %d lines' % len(said.splitlines())]


def programs(context):
    minimal = context.run(RUN, 'minimal', '--world=2', env=NO_GPU)
    losses = [line.split() for line in minimal.splitlines()]
    if len(losses) != 20 or float(losses[-1][1]) >= float(losses[0][1]):
        raise Failed('minimal: not 20 losses that fall')
    context.run(RUN, 'gpt', '--world=2', *GPT, env=NO_GPU)
    return ['minimal, 2 ranks: loss %s to %s' % (losses[0][1], losses[-1][1]),
            'gpt, 2 ranks: 3 steps']


def gpt_on_gpu(context):
    context.need_gpu()
    said = context.run(RUN, 'gpt', '--world=1', '--dtype=bf16', *GPT)
    if ' on cuda' not in said:
        raise Failed('gpt did not use the GPU')
    return said.strip().splitlines()[-1:]


def unit_tests(context):
    """Without a GPU they skip, and say so themselves."""
    return tests(context, ('optim_gpu_test', 'Optim*Gpu.*'), ('comm_gpu_test', '*'),
                 ('multiproc_gpu_test', '*'))


def engine_on_cpu(context):
    return tests(context, ('engine_gpu_test', '*'),
                 env={**NO_GPU, 'TESSERA_GPU_TEST_DEVICE': 'cpu'})


def engine(context, pattern):
    context.need_gpu()
    return tests(context, ('engine_gpu_test', pattern),
                 env={**SAME_BITS, 'TESSERA_TEST_BACKEND': 'gloo'})


def nccl(context):
    """NCCL's collectives, with one rank.

    Not an engine's: one rank has nobody to exchange with, and gets no
    communicator of NCCL's, whatever the backend.
    """
    context.need_gpu()
    return tests(context, ('comm_gpu_test', '*Nccl*'))


def sanitizer(context):
    """memcheck on all, racecheck and initcheck on kernels that add up."""
    context.need_gpu()
    tool = shutil.which('compute-sanitizer') or shutil.which(
        'compute-sanitizer', path='/usr/local/cuda/bin')
    if tool is None:
        raise Skip('no compute-sanitizer')
    figures = []
    for check, program, pattern in (
            ('memcheck', 'comm_gpu_test', '*'),
            ('memcheck', 'optim_gpu_test', KERNELS + '*'),
            ('memcheck', 'engine_gpu_test', '*Bf16/World1Stage3'),
            ('racecheck', 'comm_gpu_test', '*OrderedSum*'),
            ('initcheck', 'comm_gpu_test', '*OrderedSum*'),
            ('racecheck', 'optim_gpu_test', NORM),
            ('initcheck', 'optim_gpu_test', NORM)):
        try:
            figures += [check + ': ' + line for line in tests(
                context, (program, pattern), prefix=(
                    tool, '--tool', check, '--target-processes', 'all',
                    # NCCL asks for kernels that a GPU does not have.
                    '--report-api-errors', 'no', '--error-exitcode', '86'),
                env={**SAME_BITS, 'TESSERA_TEST_BACKEND': 'gloo'})]
        except Skip as skip:
            figures.append('%s: %s: skipped: %s' % (check, program, skip))
    return figures


class Size:
    """Of the GPT: some 1 B parameters, fewer where four do not fit the GPU."""

    def __init__(self, gpu, trainings=4):
        self.layers, self.dim, self.heads, self.seq = 2, 64, 2, 32
        self.rounds, self.steps, self.micro_batch = 2, 2, 2
        if gpu is None:
            return
        self.dim, self.heads, self.seq = 2048, 16, 1024
        self.rounds, self.steps = 6, 5
        # 20 bytes a parameter (masters, states, gradients, a copy), and what
        # does not depend on the number of layers.
        layer = 20 * 12 * self.dim**2
        room = 0.92 * gpu.memory / trainings - 4e9
        self.layers = max(1, min(20, int(room / layer)))

    def flags(self, *more):
        return [word for name in ('layers', 'dim', 'heads', 'seq') + more
                for word in ('--' + name, str(getattr(self, name)))]

    def config(self, stage, **sharding):
        """The configuration of bench_train's flags, with keys of `sharding`."""
        return {
            'train_micro_batch_size_per_gpu': self.micro_batch,
            'gradient_clipping': 0,
            'optimizer': {'type': 'AdamW',
                          'params': {'lr': 1e-3, 'weight_decay': 0.01}},
            'bf16': {'enabled': True},
            'communication_data_type': 'fp32',
            'zero_optimization': {'stage': stage},
            'sharding': sharding,
        }

    def __str__(self):
        return ('GPT of %.2f M parameters (%d layers, width %d), bf16, %d x %d '
                'tokens a step' % (12e-6 * self.layers * self.dim**2,
                                   self.layers, self.dim, self.micro_batch,
                                   self.seq))


def ours(size, context, *more):
    own = size.flags() if '--config' in more else [
        '--dtype', 'bf16', *size.flags('micro_batch')]
    return [RUN, 'bench_train', '--turns', '--data', DATA,
            '--device', 'gpu' if context.gpu else 'cpu', '--device_init',
            '--peak_tflops', str(peak_tflops(context.gpu)), *own, *more]


def peak_tflops(gpu):
    """0 if it is not known."""
    return next((peak for name, peak in PEAKS if gpu and name in gpu.name), 0)


def fsdp2(size, context):
    return [PYTHON, os.path.join(HERE, 'benchmarks', 'train_peer.py'),
            '--engine', 'fsdp2', '--data', DATA, '--bf16', '--device',
            'cuda' if context.gpu else 'cpu', '--device_init',
            *size.flags('micro_batch')]


def configured(context, size, name, stage, **sharding):
    """ours() with these keys of `sharding`, in a file of that name."""
    path = '%s.%s.json' % (context.log, name)
    with open(path, 'w', encoding='utf-8') as file:
        json.dump(size.config(stage, **sharding), file)
    return ours(size, context, '--config', path)


def figures_of(end):
    """Of use and memory, from what a training says at its end.

    Those of steps are of all after the warm-up, the first two.
    """
    words = []
    if end.get('mfu') is not None:
        words.append('%.3f of the peak (MFU, by 6 N + 12 L d T)' % end['mfu'])
    if end.get('device'):
        words.append('allocated %.2f GB at the peak, reserved %.2f GB' % (
            end['device']['allocated_peak'] / 1e9,
            end['device']['reserved'] / 1e9))
    if end.get('engine') == 'tessera':
        words.append('ledger: %.4f GB at a step\'s peak; peaks of %s' % (
            end['activations']['ledger_at_peak'] / 1e9, ', '.join(
                '%s %.4f' % (kind, count / 1e9)
                for kind, count in end['bytes_at_peak'].items())))
    return words


def take_turns(context, size, commands):
    """Figures of trainings [(name, command, environment)], the first one 1.00."""
    figures, rounds = [str(size)], []
    if context.gpu is None:
        figures.append('on the CPU: this shows that it runs, and no more')
    turns.TURN_LIMIT = context.left()
    all_commands = [(name, command, 1, env) for name, command, env in commands]
    try:
        with turns.trainings(all_commands, dict(os.environ)) as started:
            turns.interleave(started, WARM_UP, 1)
            for _ in range(size.rounds):
                begin = time.monotonic()
                rounds.append(turns.interleave(started, size.steps, 1))
                took = time.monotonic() - begin
                if begin + 2 * took + END_SECONDS > context.deadline:
                    break
            ends = {training.name: training.end() for training in started}
            losses = {training.name: training.losses for training in started}
    except SystemExit as end:
        context.note(str(end))
        raise Failed(' | '.join(str(end).splitlines()[-4:])) from None
    medians = {name: [statistics.median(turn[name][0]) for turn in rounds]
               for name in ends}
    first = next(iter(medians.values()))
    for name, each in medians.items():
        context.note('%s: %s' % (name, each))
        middle = statistics.median(each)
        figures.append(
            '%s: %.2f ms a step (%.2f to %.2f), %.0f tokens/s, %.3f of the '
            'first one\'s time' % (
                name, middle, min(each), max(each),
                1e3 * size.micro_batch * size.seq / middle,
                statistics.median(a / b for a, b in zip(each, first))))
        figures += ['%s: %s' % (name, text) for text in figures_of(ends[name])]
    figures.append('%d rounds of %d steps' % (len(rounds), size.steps))
    return figures + same_losses(losses)


def same_losses(losses):
    """Whether those of stages are the same bits: {"stage N, how": losses}."""
    figures, by_way = [], {}
    for name, each in losses.items():
        stage, _, way = name.partition(', ')
        if stage.startswith('stage '):
            by_way.setdefault(way, {})[name] = each
    for stages in by_way.values():
        if len(stages) < 2:
            continue
        first, expected = next(iter(stages.items()))
        differ = [i for each in stages.values()
                  for i, (a, b) in enumerate(zip(each, expected)) if a != b]
        figures.append('losses of %s: %s' % (
            '; '.join(stages), 'not those of %s from step %d on' % (
                first, min(differ)) if differ else
            'the same bits in %d steps' % len(expected)))
    return figures


def speed(context):
    """Beside libtorch at the same work: a model in bfloat16, float32 masters."""
    size = Size(context.gpu, trainings=5)
    commands = [('plain libtorch', ours(size, context, '--engine', 'plain_bf16'),
                 {}),
                ('plain libtorch, autocast',
                 ours(size, context, '--engine', 'none'), {}),
                ('stage 0', ours(size, context, '--stage', '0'), {}),
                ('stage 3', ours(size, context, '--stage', '3'), {})]
    code, _ = context.code_and_output(
        PYTHON, '-c', 'import torch.distributed.fsdp')
    if code == 0:
        commands.append(('FSDP2', fsdp2(size, context), {}))
    figures = take_turns(context, size, commands)
    if code != 0:
        figures.append('FSDP2: skipped: %s cannot import torch' % PYTHON)
    return figures


def clipping(context):
    context.need_gpu()
    size = Size(context.gpu)
    return take_turns(context, size, [
        ('stage 3', ours(size, context), {}),
        ('stage 3, clipping', ours(size, context, '--clip', '1'), {})])


def peaks(context):
    context.need_gpu()
    size = Size(context.gpu)
    size.rounds = 1
    stages = [('stage %d' % stage, ours(size, context, '--stage', str(stage)), {})
              for stage in (0, 2, 3)]
    name, command, _ = stages[-1]
    return take_turns(context, size, stages + [
        (name + ', expandable segments', command,
         {'PYTORCH_ALLOC_CONF': 'expandable_segments:True'})])


def deterministic(context):
    """What the same bits in each run cost, with fused attention."""
    context.need_gpu()
    size = Size(context.gpu, trainings=3)
    commands = []
    for stage, mode in (3, 'auto'), (0, 'on'), (3, 'on'):
        commands.append(('stage %d, deterministic %s' % (stage, mode),
                         configured(context, size, '%d.%s' % (stage, mode),
                                    stage, deterministic=mode), SAME_BITS))
    return take_turns(context, size, commands)


def shard_alone(context):
    """What gathering and freeing all parameters costs, on one card."""
    context.need_gpu()
    size = Size(context.gpu, trainings=2)
    return take_turns(context, size, [
        ('plain libtorch', ours(size, context, '--engine', 'plain_bf16'), {}),
        ('stage 3, gathered',
         configured(context, size, 'alone', 3, shard_alone=True), {})])


# (name, seconds, function, what it is)
ITEMS = (
    ('gpu', 5, gpu, 'the driver, and what it finds'),
    ('ldd', 60, ldd, 'every program finds its libraries'),
    ('tools', 20, tools, '`tessera` reads a configuration'),
    ('programs', 60, programs, 'examples, 2 ranks on the CPU'),
    ('engine_cpu', 60, engine_on_cpu, 'the test of the engine, on the CPU'),
    ('unit', 120, unit_tests, 'GPU tests of optimizer and communication'),
    ('gpt_gpu', 60, gpt_on_gpu, 'the example on the GPU'),
    ('engine', 240, lambda c: engine(c, '*World1*'),
     'engine against the oracle, W = 1'),
    ('gloo', 150, lambda c: engine(c, '*World2*:*World3*'),
     'the same, W = 2 and 3 over gloo on one GPU'),
    ('nccl', 90, nccl, 'collectives of NCCL with one rank, no engine'),
    ('sanitizer', 300, sanitizer, 'compute-sanitizer'),
    ('speed', 300, speed,
     'in turns: plain libtorch (bf16, autocast), ours, FSDP2, W = 1'),
    ('clipping', 90, clipping, 'what clipping costs'),
    ('deterministic', 180, deterministic,
     'what deterministic attention costs, and whether stages are equal'),
    ('shard_alone', 120, shard_alone,
     'stage 3 as of many ranks, on one card, beside plain libtorch'),
    ('peaks', 120, peaks, 'memory beside what the ledger says'),
)
