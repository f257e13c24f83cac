#!/usr/bin/python3
"""The files of this folder start a program on two ranks, which has then the
output that it has by --world=2.

mpirun is Open MPI's own. srun is a stand-in that sets srun's variables; so is
torchrun, unless the Python of TESSERA_PYTHON has it; and Kubernetes is what the
training operator does with pytorchjob.yaml.

usage: launch_test.py PROGRAM
"""

import os
import pathlib
import shutil
import socket
import subprocess
import sys
import unittest

import yaml

HERE = pathlib.Path('examples/launch')
PROGRAM = ''

# As srun starts the tasks of a step on one host.
SRUN = '''#!/bin/bash
[[ "$1" == --kill-on-bad-exit=1 ]] || { echo "srun: options? $*"; exit 64; }
shift
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2
export SLURM_STEP_NODELIST=localhost SLURM_NODEID=0
for task in 0 1; do
  SLURM_PROCID=${task} SLURM_LOCALID=${task} "$@" &
done
wait -n && wait -n
'''

# As torchrun starts the ranks of one host with a static rendezvous.
TORCHRUN = '''#!/bin/bash
for option in --no-python --nnodes=1 --node_rank=0 --nproc_per_node=2 \\
    --master_addr=127.0.0.1 --master_port=${PORT} --max_restarts=0; do
  [[ "$1" == "${option}" ]] || { echo "torchrun: $1?"; exit 64; }
  shift
done
export WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=${PORT}
export TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_USE_AGENT_STORE=False
for rank in 0 1; do
  RANK=${rank} LOCAL_RANK=${rank} "$@" &
done
wait -n && wait -n
'''


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return str(s.getsockname()[1])


def run(command, env=None, path=None):
    """What it prints; its exit code must be 0."""
    env = dict(os.environ, **(env or {}))
    if path:
        env['PATH'] = '%s:%s' % (path, env['PATH'])
    done = subprocess.run([str(word) for word in command], env=env,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, timeout=60, check=False)
    if done.returncode:
        raise AssertionError('%s: exit code %d: %s%s' % (
            command, done.returncode, done.stdout, done.stderr))
    return done.stdout


class LaunchTest(unittest.TestCase):

    @classmethod
    def setUpClass(cls):
        cls.expected = run([PROGRAM, '--world=2'])
        cls.bin = pathlib.Path(os.environ['TEST_TMPDIR'], 'bin')
        cls.bin.mkdir()
        for name, text in (('srun', SRUN), ('torchrun', TORCHRUN)):
            (cls.bin / name).write_text(text)
            (cls.bin / name).chmod(0o755)

    def test_expected_is_of_two_ranks(self):
        self.assertEqual(len(self.expected.splitlines()), 20)
        self.assertNotEqual(self.expected, run([PROGRAM, '--world=1']))

    def test_mpirun(self):
        self.assertTrue(shutil.which('mpirun'), 'apt-get install openmpi-bin')
        said = run([HERE / 'mpirun.sh', PROGRAM], {
            'RANKS': '2',
            'OMPI_ALLOW_RUN_AS_ROOT': '1',
            'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1',
            'OMPI_MCA_rmaps_base_oversubscribe': '1',
        })
        self.assertEqual(said, self.expected)

    def test_slurm(self):
        said = run([HERE / 'slurm.sbatch', PROGRAM], {
            'SLURM_JOB_ID': str(os.getpid()), 'SLURM_NTASKS': '2'}, self.bin)
        self.assertEqual(said, self.expected)

    def test_slurm_tells_ranks_and_queues_the_job_again(self):
        """The signal of the time's end: to the script, by it to srun."""
        told = self.bin / 'told'
        told.mkdir(exist_ok=True)
        (told / 'srun').write_text(
            '#!/bin/bash\ntrap "echo saved; exit 0" USR1\n'
            'kill -USR1 "${PPID}"\nsleep 40 & wait\n')
        (told / 'scontrol').write_text('#!/bin/bash\necho "scontrol $*"\n')
        for name in ('srun', 'scontrol'):
            (told / name).chmod(0o755)
        said = run([HERE / 'slurm.sbatch', PROGRAM], {'SLURM_JOB_ID': '77'}, told)
        self.assertEqual(said, 'saved\nscontrol requeue 77\n')

    def test_torchrun(self):
        python = os.environ.get('TESSERA_PYTHON', '')
        real = pathlib.Path(python).parent if python else None
        path = real if real and (real / 'torchrun').exists() else self.bin
        said = run([HERE / 'torchrun.sh', PROGRAM],
                   {'RANKS': '2', 'PORT': free_port()}, path)
        self.assertEqual(said, self.expected)

    def test_kubernetes(self):
        job = yaml.safe_load((HERE / 'pytorchjob.yaml').read_text())
        self.assertEqual((job['apiVersion'], job['kind']),
                         ('kubeflow.org/v1', 'PyTorchJob'))
        specs = job['spec']['pytorchReplicaSpecs']
        self.assertEqual(specs['Master']['replicas'], 1)
        for spec in specs.values():
            pod = spec['template']['spec']
            container, = (c for c in pod['containers']
                          if c['name'] == 'pytorch')
            ports = {p['name']: p['containerPort'] for p in container['ports']}
            self.assertEqual(ports, {'pytorchjob-port': 23456})
            volumes = {volume['name'] for volume in pod['volumes']}
            for mount in container['volumeMounts']:
                self.assertIn(mount['name'], volumes)
        self.assertNotIn('nprocPerNode', job['spec'])
        # One worker, and this host in the place of the master's service.
        port = free_port()
        pods = []
        for rank in (0, 1):
            env = {'PYTHONUNBUFFERED': '1', 'MASTER_ADDR': '127.0.0.1',
                   'MASTER_PORT': port, 'WORLD_SIZE': '2', 'RANK': str(rank),
                   'PET_MASTER_ADDR': '127.0.0.1', 'PET_MASTER_PORT': port,
                   'PET_NODE_RANK': str(rank), 'PET_NNODES': '2',
                   'TESSERA_JOB_SECRET': 'of this test alone'}
            pods.append(subprocess.Popen(
                [PROGRAM], env=dict(os.environ, **env), stdout=subprocess.PIPE,
                universal_newlines=True))
        said = [pod.communicate(timeout=60)[0] for pod in pods]
        self.assertEqual([pod.returncode for pod in pods], [0, 0])
        self.assertEqual(said, [self.expected, ''])


if __name__ == '__main__':
    PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main()
