"""What gpu_check runs: a function for each item, which returns its figures.

An item that cannot be run raises Skip, one that fails Failed, one whose time is
over TimedOut; all that its programs write is in its log.
"""
import collections
import glob
import os
import re
import shutil

from gpu_context import HERE, RUN, Failed, Skip
from gpu_trainings import (
    DATA, SAME_BITS, clipping, deterministic, kernels, offload, offload_disk,
    peaks, recompute, shard_alone, speed, two_ranks)

GPT = ('--data', DATA, '--config', 'examples/gpt/zero3.json', '--dim', '32',
       '--layers', '2', '--heads', '2', '--seq', '16', '--steps', '3', '--json')
# Tests of optim's kernels, and of those of the norm.
KERNELS = 'OptimKernelsGpu.'
NORM = KERNELS + 'Norm*:' + KERNELS + 'Scalars*'
NO_GPU = {'CUDA_VISIBLE_DEVICES': ''}


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
    context.run(RUN, 'tessera', 'plan', '--config', 'examples/gpt/zero3.json',
                '--model', 'gpt:layers=1')
    context.run(RUN, 'tessera', 'doctor')
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


def engine(context, pattern, backend='gloo'):
    context.need_gpu()
    return tests(context, ('engine_gpu_test', pattern),
                 env={**SAME_BITS, 'TESSERA_TEST_BACKEND': backend})


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
    ('cuda_ipc', 150, lambda c: engine(c, '*World2*:*World3*', 'cuda_ipc'),
     'the same over cuda_ipc'),
    ('two_ranks', 60, two_ranks, 'bench_train, W = 2 over gloo on one GPU'),
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
    ('recompute', 180, recompute, 'activations computed again: memory, time, bits'),
    ('offload', 300, offload,
     'in turns: states, then parameters on the host; FSDP2 with CPUOffloadPolicy'),
    ('offload_disk', 120, offload_disk, 'in turns: states on a disk'),
    ('kernels', 90, kernels, 'one step by libtorch\'s profiler'),
)
