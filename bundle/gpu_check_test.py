#!/usr/bin/python3
"""Tests gpu_check and run, without the bundle's programs.

usage: gpu_check_test.py BUNDLE.tar.gz
"""
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import types
import unittest
from unittest import mock

from bundle_test import make_wheel


class PartsTest(unittest.TestCase):
    bundle = ''

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        with tarfile.open(PartsTest.bundle) as tar:
            for member in tar:
                if member.name.split('/')[1] not in ('bin', 'lib'):
                    tar.extract(member, self.folder)
        self.home = self.folder + '/tessera'
        sys.path.insert(0, self.home)
        self.addCleanup(sys.path.remove, self.home)
        for name in ('gpu_context', 'gpu_items', 'gpu_trainings', 'turns'):
            sys.modules.pop(name, None)
        loader = importlib.machinery.SourceFileLoader(
            'gpu_check', self.home + '/gpu_check')
        self.gpu_check = importlib.util.module_from_spec(
            importlib.util.spec_from_loader('gpu_check', loader))
        loader.exec_module(self.gpu_check)
        self.trainings = sys.modules['gpu_trainings']

    def found(self, driver, **library):
        """find_gpu's, with a library of these functions; without, none."""
        def load(_):
            if not library:
                raise OSError('libcuda.so.1: cannot open')
            return types.SimpleNamespace(cuGetErrorName=name_error, **library)

        def name_error(_, to):
            to._obj.value = b'CUDA_ERROR_OF_TEST'
        with mock.patch.object(self.gpu_check, 'DRIVER', driver), \
                mock.patch.object(self.gpu_check.ctypes, 'CDLL', load):
            return self.gpu_check.find_gpu()

    def test_no_gpu_is_nothing_wrong(self):
        nowhere = self.folder + '/none'
        self.assertEqual(self.found(nowhere), (None, ''))
        self.assertEqual(self.found(nowhere, cuInit=lambda _: 100), (None, ''))

    def test_a_driver_that_does_not_work(self):
        gpu, wrong = self.found(self.home)
        self.assertIsNone(gpu)
        self.assertIn('no library: libcuda.so.1: cannot open', wrong)
        self.assertEqual(
            self.found(self.home, cuInit=lambda _: 803),
            (None, 'cuInit failed with 803 (CUDA_ERROR_OF_TEST)'))
        self.assertEqual(
            self.found(self.home, cuInit=lambda _: 0,
                       cuDeviceGetCount=lambda _: 999),
            (None, 'cuDeviceGetCount failed with 999 (CUDA_ERROR_OF_TEST)'))

    def test_what_is_wrong_is_said(self):
        of_items = self.gpu_check.gpu_context
        context = of_items.Context(
            self.folder + '/log', 9, None, 'cuInit failed')
        with self.assertRaisesRegex(of_items.Failed, 'cuInit failed'):
            self.gpu_check.gpu_items.gpu(context)
        with self.assertRaisesRegex(of_items.Skip, 'cuInit failed'):
            context.need_gpu()

    def runs_of(self, item):
        """What an item runs of tests on a GPU: [(program, pattern, prefix)]."""
        items = self.gpu_check.gpu_items
        context = self.gpu_check.gpu_context.Context(
            self.folder + '/log', 9, object())
        runs = []

        def gtest(program, pattern='*', _=None, prefix=()):
            runs.append((program, pattern, tuple(prefix)))
            return 1, 0, ''
        with mock.patch.object(context, 'gtest', gtest), \
                mock.patch.object(items.shutil, 'which', lambda *_, **__: 'tool'):
            next(do for name, _, do, _ in items.ITEMS if name == item)(context)
        return runs

    def test_no_item_is_another_one_again(self):
        """An environment alone makes no other run: W = 1 has one communicator."""
        runs = [tuple(self.runs_of(item))
                for item in ('unit', 'engine', 'gloo', 'nccl', 'sanitizer')]
        self.assertEqual(len(set(runs)), len(runs))
        self.assertEqual(self.runs_of('nccl'), [('comm_gpu_test', '*Nccl*', ())])

    def test_errors_of_nccls_own_are_not_the_sanitizers(self):
        runs = self.runs_of('sanitizer')
        self.assertEqual(len(runs), 7)
        for _, _, prefix in runs:
            at = prefix.index('--report-api-errors')
            self.assertEqual(prefix[at + 1], 'no')

    def test_losses_of_stages_are_compared(self):
        """Those of one way: with clipping they are others."""
        same = self.trainings.same_losses
        self.assertEqual(
            same({'plain': [9], 'stage 0': [3, 2, 1], 'stage 3': [3, 2, 1],
                  'stage 3, clipping': [3, 5, 6]}),
            ['losses of stage 0; stage 3: the same bits in 3 steps'])
        self.assertEqual(
            same({'stage 0, on': [3, 2, 1], 'stage 3, on': [3, 4, 5]}),
            ['losses of stage 0, on; stage 3, on: not those of stage 0, on '
             'from step 1 on'])

    def commands_of(self, *items):
        """What these take turns with on a GPU: [(name, command, environment)]."""
        context = self.gpu_check.gpu_context.Context(
            self.folder + '/log', 9, types.SimpleNamespace(
                name='NVIDIA H200', memory=140e9))
        taken = []

        def take_turns(_, __, commands, alike=False):
            del alike
            taken.extend(commands)
            return []
        with mock.patch.object(self.trainings, 'take_turns', take_turns), \
                mock.patch.object(context, 'code_and_output', lambda *_: (0, '')):
            for item in items:
                getattr(self.trainings, item)(context)
        return taken

    def config_of(self, command):
        with open(command[command.index('--config') + 1],
                  encoding='utf-8') as file:
            return json.load(file)

    def test_commands_of_trainings(self):
        taken = self.commands_of('speed', 'deterministic')
        names = [name for name, _, _ in taken]
        self.assertEqual(names[:5], ['plain libtorch', 'plain libtorch, autocast',
                                     'stage 0', 'stage 3', 'FSDP2'])
        for name, command, _ in taken:
            self.assertIn('--device_init', command, name)
            if name != 'FSDP2':
                self.assertEqual(
                    command[command.index('--peak_tflops') + 1], '989')
        self.assertIn('plain_bf16', taken[0][1])
        for name, command, _ in taken[5:]:
            self.assertNotIn('--dtype', command)
            mode = self.config_of(command)['sharding']['deterministic']
            self.assertEqual(name.split()[-1], mode)

    def test_the_config_of_one_rank_that_gathers(self):
        config = self.config_of(self.commands_of('shard_alone')[1][1])
        self.assertEqual(config['sharding'], {'shard_alone': True})
        self.assertEqual(config['zero_optimization'], {'stage': 3})

    def test_configs_of_offload_and_recompute(self):
        """An update on the host has all processors, that of the peer, too."""
        on_device, states, parameters, peer = self.commands_of('offload')
        self.assertEqual(on_device[2], {})
        for _, command, environment in (states, parameters):
            zero = self.config_of(command)['zero_optimization']
            self.assertEqual(zero['offload_optimizer'], {'device': 'cpu'})
            self.assertEqual(environment, peer[2])
        self.assertEqual(zero['offload_param'], {'device': 'cpu'})
        self.assertIn('--cpu_offload', peer[1])
        kept, _, full = self.commands_of('recompute')
        self.assertNotIn('activation_checkpointing', self.config_of(kept[1]))
        self.assertEqual(self.config_of(full[1])['activation_checkpointing'],
                         {'units': ['PeerBlock'], 'policy': 'full'})

    def test_kernels_that_overlap_are_busy_once(self):
        kernel = {'cat': 'kernel', 'name': 'product'}
        self.assertEqual(
            self.trainings.figures_of_kernels([
                {'cat': 'cpu_op', 'ts': 0, 'dur': 9000, 'name': 'aten::mm'},
                {**kernel, 'ts': 3000, 'dur': 2000, 'name': 'sum'},
                {**kernel, 'ts': 1000, 'dur': 3000},
                {**kernel, 'ts': 9000, 'dur': 2000}]),
            ['the device is busy for 6.00 of 10.00 ms (0.600), 3 launches',
             '5.00 ms: product', '2.00 ms: sum'])

    def test_an_output_that_stays_open(self):
        """By a session of its own, which is not killed."""
        of_items = self.gpu_check.gpu_context
        begin = time.monotonic()
        with mock.patch.object(of_items, 'KILL_SECONDS', 0.5):
            with self.assertRaises(of_items.TimedOut):
                of_items.Context(self.folder + '/log', 1, None).run(
                    'sh', '-c', 'echo begun; setsid sleep 20 & sleep 60')
        self.assertLess(time.monotonic() - begin, 10)
        with open(self.folder + '/log', encoding='utf-8') as file:
            self.assertIn('\nbegun\n', file.read())

    def run_says(self, **environment):
        """(exit code, output) of a command that tells of its libraries."""
        done = subprocess.run(
            [self.home + '/run', 'sh', '-c', 'echo "${LD_LIBRARY_PATH}"'],
            env={'PATH': '/usr/bin:/bin', 'TESSERA_PYTHON': sys.executable,
                 **environment},
            cwd=self.folder, check=False, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        return done.returncode, done.stdout

    def test_the_version_of_libtorch(self):
        torch = self.folder + '/libtorch'
        header = torch + '/include/torch/headeronly/version.h'
        os.makedirs(os.path.dirname(header))
        code, said = self.run_says(TESSERA_LIBTORCH=torch)
        self.assertEqual(code, 127)
        self.assertIn('of no version that it tells; these', said)
        for path, text in (
                (header, '#define TORCH_VERSION_MAJOR 2\n'
                 '#define TORCH_VERSION_MINOR %s\n'
                 '#define TORCH_VERSION_PATCH 0\n'
                 '#define TORCH_VERSION_ABI_TAG 0\n'),
                (torch + '/build-version', '2.%s.0+cu130\n'),
                (torch + '/version.py', "__version__ = '2.%s.0'\n")):
            for minor, expected in ('10', 127), ('110', 127), ('11', 0):
                with open(path, 'w', encoding='utf-8') as file:
                    file.write(text % minor)
                code, said = self.run_says(TESSERA_LIBTORCH=torch)
                self.assertEqual(code, expected, said)
                self.assertIn('/libtorch/lib' if code == 0 else
                              'is torch 2.%s.0' % minor, said)

    def test_a_torch_of_the_current_folder_is_not_taken(self):
        make_wheel(self.folder, '2.10.0')
        make_wheel(self.folder + '/wheels')
        code, said = self.run_says(PYTHONPATH=self.folder + '/wheels')
        self.assertEqual(code, 0, said)
        self.assertIn(self.folder + '/wheels/torch/lib', said)


if __name__ == '__main__':
    PartsTest.bundle = sys.argv[1]
    unittest.main(argv=sys.argv[:1], verbosity=2)
