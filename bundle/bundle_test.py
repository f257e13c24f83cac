#!/usr/bin/python3
"""Is the bundle all that a machine without this build needs?

usage: bundle_test.py BUNDLE.tar.gz PROGRAM

Unpacks it and runs gpu_check in a file system of its own (user and mount
namespace, chroot) that has Debian without the libraries that our build installs,
and none of our folders. PROGRAM, as Bazel built it, tells where libtorch is: its
folder is at a neutral place there, as a wheel of Python's that is not imported.
"""
import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

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


if __name__ == '__main__':
    if sys.argv[1] == IN_THE_NAMESPACE:
        inside(*sys.argv[2:])
    BundleTest.bundle, BundleTest.program = sys.argv[1:]
    unittest.main(argv=sys.argv[:1], verbosity=2)
