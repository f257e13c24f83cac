#!/usr/bin/python3
"""Is the bundle all that a machine without this build needs?

usage: bundle_test.py BUNDLE.tar.gz PROGRAM

Unpacks it and runs gpu_check in a file system of its own (user and mount
namespace, chroot) that has Debian without the libraries that our build installs,
and none of our folders. PROGRAM, as Bazel built it, tells where libtorch is: its
folder is at a neutral place there, as a wheel of Python's that is not imported.
"""
import ctypes
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import types
import unittest
from unittest import mock

LIB = '/usr/lib/x86_64-linux-gnu'
# Debian's packages that tools/setup installs for the build.
OURS = re.compile(r'lib(absl_|protobuf|uring|isal|sodium|gtest|gmock|benchmark)')
MAX_BYTES = 60 << 20
GLIBC_MINOR = 34  # of 2.34, as docs/bundle.md says
ON_CPU = {'ldd', 'tools', 'programs', 'engine_cpu', 'speed'}
RBIND, TMPFS = 0x1000 | 0x4000, 0
DRIVER = '/proc/driver'
IN_THE_NAMESPACE = '--inside'


def mount(source, target, flags=RBIND, kind=None):
    os.makedirs(target, exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind, flags, None) != 0:
        raise OSError(ctypes.get_errno(), 'mount', target)


def make_root(root, folders):
    """A machine's file system, with libraries of a wheel from `folders`."""
    mount('none', root, TMPFS, b'tmpfs')
    for name in ('usr', 'etc', 'proc', 'dev'):
        mount('/' + name, root + '/' + name)
    if os.path.isdir(root + DRIVER):  # nor this machine's
        mount('none', root + DRIVER, TMPFS, b'tmpfs')
    for name in ('bin', 'sbin', 'lib', 'lib64'):
        os.symlink('usr/' + name, root + '/' + name)
    mount('none', root + '/usr/local', TMPFS, b'tmpfs')
    # Debian's libraries, except ours, as links to what is now elsewhere.
    mount(LIB, root + '/mnt')
    mount('none', root + LIB, TMPFS, b'tmpfs')
    for name in os.listdir(LIB):
        if not OURS.match(name):
            os.symlink('/mnt/' + name, root + LIB + '/' + name)
    os.makedirs(root + '/tmp')
    for i, folder in enumerate(folders):
        torch = os.path.exists(folder + '/libtorch_cpu.so')
        mount(folder, '%s/wheels/%s/lib' % (
            root, 'torch' if torch else 'nvidia/%d' % i))
    make_wheel(root + '/wheels')


def make_wheel(folder, version='2.11.0'):
    """What tells of a torch in `folder`, without its libraries."""
    os.makedirs(folder + '/torch', exist_ok=True)
    open(folder + '/torch/__init__.py', 'w', encoding='utf-8').close()
    with open(folder + '/torch/version.py', 'w', encoding='utf-8') as file:
        file.write("__version__ = '%s'\n" % version)


def inside(bundle, root, left_out, *command_and_folders):
    """In the namespaces, as their root."""
    split = command_and_folders.index('--')
    command = command_and_folders[:split]
    make_root(root, command_and_folders[split + 1:])
    with tarfile.open(bundle) as tar:
        tar.extractall(root + '/home')
    if left_out:
        os.remove(root + '/home/tessera/' + left_out)
    os.chroot(root)
    os.chdir('/home/tessera')
    os.execve(command[0], command, {
        'PATH': '/usr/bin:/bin', 'PYTHONPATH': '/wheels', 'HOME': '/tmp',
        'CUDA_VISIBLE_DEVICES': ''})


def libraries_of(file):
    """What ldd says of it; nothing of a file that is not there."""
    if not os.path.exists(file):
        return ''
    return subprocess.run(['ldd', file], check=True, text=True,
                          stdout=subprocess.PIPE).stdout


class BundleTest(unittest.TestCase):
    bundle, program = '', ''

    def setUp(self):
        said = libraries_of(self.program)
        torch = os.path.dirname(re.search(r'/\S+/libtorch_cpu\.so', said)[0])
        said += libraries_of(torch + '/libtorch_cuda.so')
        paths = [os.path.realpath(path)
                 for path in re.findall(r'=> (/\S+)', said)]
        self.folders = sorted({os.path.dirname(path) for path in paths
                               if not path.startswith('/usr/lib/')})
        self.root = tempfile.TemporaryDirectory()
        self.addCleanup(self.root.cleanup)

    def run_inside(self, *command, left_out=''):
        if shutil.which('unshare') is None:
            print('SKIPPED: no unshare (util-linux) here')
            self.skipTest('no unshare')
        namespaces = ['unshare', '--user', '--map-root-user', '--mount']
        may = subprocess.run([*namespaces, 'true'], check=False,
                             stderr=subprocess.PIPE, text=True)
        if may.returncode != 0:
            print('SKIPPED: no user namespaces here: ' + may.stderr.strip())
            self.skipTest('no user namespaces')
        done = subprocess.run(
            [*namespaces, sys.executable, os.path.abspath(__file__),
             IN_THE_NAMESPACE, os.path.abspath(self.bundle), self.root.name,
             left_out, *command, '--', *self.folders],
            check=False, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT)
        print(done.stdout)
        return done.returncode, done.stdout

    def check(self, *options, **how):
        """(exit code, {item: result}, the report)"""
        code, said = self.run_inside(
            '/bin/sh', '-c', './gpu_check --out /tmp/out "$@"; code=$?; '
            'echo REPORT; cat /tmp/out/report.md; echo JSON; '
            'cat /tmp/out/report.json; exit ${code}', 'sh', *options, **how)
        report, _, data = said.partition('\nREPORT\n')[2].partition('\nJSON\n')
        rows = re.findall(r'^\| (\w+) \| .* \| (.*) \| +[\d.]+ \|$', report, re.M)
        self.assertEqual({item['name']: item['status']
                          for item in json.loads(data)['items']}, dict(rows))
        return code, dict(rows), report

    def test_size(self):
        print('%.1f MiB' % (os.path.getsize(self.bundle) / 2**20))
        self.assertLess(os.path.getsize(self.bundle), MAX_BYTES)

    def test_what_is_in_the_files(self):
        """No folder of ours; and no glibc is needed that is newer than said."""
        with tarfile.open(self.bundle) as tar:
            for member in tar:
                data = tar.extractfile(member).read()
                for folder in self.folders:
                    self.assertFalse(folder.encode() in data,
                                     member.name + ' names ' + folder)
                for minor in re.findall(rb'\0GLIBC_2\.(\d+)(?=\0)', data):
                    self.assertLessEqual(int(minor), GLIBC_MINOR, member.name)

    def test_a_machine_without_a_gpu(self):
        code, results, report = self.check()
        self.assertEqual(code, 0)
        self.assertIn('- GPU: none\n', report)
        self.assertIn('- torch: 2.11.0 in /wheels/torch\n', report)
        for item, result in results.items():
            self.assertEqual(
                result, 'passed' if item in ON_CPU else 'skipped: no GPU', item)
        self.assertRegex(report, r'plain libtorch, autocast: .* of the first')
        self.assertRegex(report, 'losses of stage 0; stage 3: the same bits')
        self.assertGreater(len(results), 10)

    def test_a_gpu_that_is_demanded(self):
        code, results, report = self.check('--only', 'gpt_gpu', '--gpu')
        self.assertEqual((code, results),
                         (1, {'gpu': 'failed', 'gpt_gpu': 'skipped: no GPU'}))
        self.assertIn('- GPU: no GPU\n', report)

    def protobuf(self):
        """The name of its library in the bundle."""
        with tarfile.open(self.bundle) as tar:
            return next(name for name in map(os.path.basename, tar.getnames())
                        if re.match(r'libprotobuf\.so\.', name))

    def test_a_library_that_is_left_out_is_seen(self):
        name = self.protobuf()
        code, results, report = self.check(
            '--only', 'ldd', left_out='lib/' + name)
        self.assertEqual((code, results), (1, {'ldd': 'failed'}))
        self.assertIn(name + ' => not found', report)

    def test_our_folders_are_out_of_sight(self):
        paths = [*self.folders, os.path.realpath(self.program),
                 os.path.realpath(__file__), os.path.join(LIB, self.protobuf())]
        code, said = self.run_inside(
            '/bin/sh', '-c', 'for path in /usr/bin/python3 "$@"; do '
            '[ ! -e "${path}" ] || echo "${path}"; done', 'sh', *paths)
        self.assertEqual((code, said), (0, '/usr/bin/python3\n'))


class PartsTest(unittest.TestCase):
    """Of gpu_check and run, without the bundle's programs."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        with tarfile.open(BundleTest.bundle) as tar:
            for member in tar:
                if member.name.split('/')[1] not in ('bin', 'lib'):
                    tar.extract(member, self.folder)
        self.home = self.folder + '/tessera'
        sys.path.insert(0, self.home)
        self.addCleanup(sys.path.remove, self.home)
        for name in ('gpu_context', 'gpu_items', 'turns'):
            sys.modules.pop(name, None)
        loader = importlib.machinery.SourceFileLoader(
            'gpu_check', self.home + '/gpu_check')
        self.gpu_check = importlib.util.module_from_spec(
            importlib.util.spec_from_loader('gpu_check', loader))
        loader.exec_module(self.gpu_check)

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
        same = self.gpu_check.gpu_items.same_losses
        self.assertEqual(
            same({'plain': [9], 'stage 0': [3, 2, 1], 'stage 3': [3, 2, 1],
                  'stage 3, clipping': [3, 5, 6]}),
            ['losses of stage 0; stage 3: the same bits in 3 steps'])
        self.assertEqual(
            same({'stage 0, on': [3, 2, 1], 'stage 3, on': [3, 4, 5]}),
            ['losses of stage 0, on; stage 3, on: not those of stage 0, on '
             'from step 1 on'])

    def test_commands_of_trainings(self):
        items, gpu = self.gpu_check.gpu_items, types.SimpleNamespace(
            name='NVIDIA H200', memory=140e9)
        context = self.gpu_check.gpu_context.Context(
            self.folder + '/log', 9, gpu)
        taken = []
        with mock.patch.object(
                items, 'take_turns', lambda _, __, commands: taken.extend(commands)
                or []), mock.patch.object(
                    context, 'code_and_output', lambda *_: (0, '')):
            items.speed(context)
            items.deterministic(context)
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
            with open(command[command.index('--config') + 1],
                      encoding='utf-8') as file:
                mode = json.load(file)['sharding']['deterministic']
            self.assertEqual(name.split()[-1], mode)

    def test_the_config_of_one_rank_that_gathers(self):
        items, gpu = self.gpu_check.gpu_items, types.SimpleNamespace(
            name='NVIDIA H200', memory=140e9)
        context = self.gpu_check.gpu_context.Context(
            self.folder + '/log', 9, gpu)
        taken = []
        with mock.patch.object(
                items, 'take_turns', lambda _, __, commands: taken.extend(commands)
                or []):
            items.shard_alone(context)
        command = taken[1][1]
        with open(command[command.index('--config') + 1],
                  encoding='utf-8') as file:
            config = json.load(file)
        self.assertEqual(config['sharding'], {'shard_alone': True})
        self.assertEqual(config['zero_optimization'], {'stage': 3})

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
    if sys.argv[1] == IN_THE_NAMESPACE:
        inside(*sys.argv[2:])
    BundleTest.bundle, BundleTest.program = sys.argv[1:]
    unittest.main(argv=sys.argv[:1], verbosity=2)
