"""The environment of the peers: Python packages in a folder of their own.

It is made once, from requirements.txt, beside what tools/setup keeps, and is
used by PYTHONPATH alone: nothing is activated and nothing else is changed.
"""
import glob
import hashlib
import os
import shutil
import subprocess
import tempfile

PYTHON = '/usr/bin/python3'  # Debian's: 3.11, as requirements.txt says
NEEDED_MIB = 4500
REQUIREMENTS = os.path.join(os.path.dirname(os.path.abspath(__file__)),
                            'requirements.txt')


def output_of(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f'peers: {" ".join(command)}: '
                         f'{last_line(done.stderr) or "failed"}')
    return done.stdout.strip()


def last_line(text):
    lines = [line.strip() for line in text.splitlines()
             if line.strip() and not line.startswith(('WARNING', '[notice]'))]
    return lines[-1] if lines else ''


def cache_folder():
    return output_of('tools/find_libtorch', '--cache')


def library_path():
    """Where the CUDA libraries are that torch's wheel wants to load."""
    beside = os.path.dirname(output_of('tools/find_libtorch'))
    cuda = os.environ.get('CUDA_HOME', '/usr/local/cuda')
    return ':'.join([f'{cuda}/lib64',
                     *sorted(glob.glob(f'{beside}/nvidia/*/lib'))])


def variables(folder):
    """What a program of the environment adds to its own."""
    return {
        'PYTHONPATH': folder,
        'PATH': f'{folder}/bin:{os.environ.get("PATH", os.defpath)}',
        'LD_LIBRARY_PATH': library_path(),
        'DS_ACCELERATOR': 'cpu',
    }


def pip_install(folder, requirements):
    listed = f'{folder}.requirements'
    with open(listed, 'w', encoding='utf-8') as file:
        file.write('\n'.join(requirements) + '\n')
    command = [
        PYTHON, '-m', 'pip', 'install', '--quiet', '--no-cache-dir', '--no-deps',
        '--require-hashes', '--no-build-isolation', '--no-input',
        '--disable-pip-version-check', '--root-user-action=ignore',
        '--retries', '3', '--target', folder, '--requirement', listed]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, env={**os.environ, **variables(folder),
                              'DS_BUILD_OPS': '0', 'PYTHONNOUSERSITE': '1'})
    finally:
        os.remove(listed)
    if done.returncode != 0:
        raise SystemExit(
            'peers: pip cannot install the peers (is there a network, and room '
            'on the disk?): ' + (last_line(done.stderr) or last_line(done.stdout)
                                 or f'exit code {done.returncode}'))


def check(folder):
    done = subprocess.run(
        [PYTHON, '-c', 'import deepspeed, numpy, safetensors, torch'],
        capture_output=True, text=True, check=False,
        env={**os.environ, **variables(folder)})
    if done.returncode != 0:
        raise SystemExit(
            'peers: what was installed cannot be imported (torch needs the CUDA '
            'libraries that tools/setup finds): ' + last_line(done.stderr))


def make(folder, lines):
    os.makedirs(os.path.dirname(folder), exist_ok=True)
    free = shutil.disk_usage(os.path.dirname(folder)).free >> 20
    if free < NEEDED_MIB:
        raise SystemExit(f'peers: the peers need {NEEDED_MIB} MiB of disk space '
                         f'beside {folder}, {free} MiB are free')
    print('peers: installing torch and DeepSpeed (600 MB, once)', flush=True)
    work = tempfile.mkdtemp(prefix='.peers.', dir=os.path.dirname(folder))
    try:
        # DeepSpeed's own build imports torch and setuptools.
        late = [line for line in lines if line.startswith('deepspeed==')]
        pip_install(f'{work}/x', [line for line in lines if line not in late])
        pip_install(f'{work}/x', late)
        check(f'{work}/x')
        try:
            os.rename(f'{work}/x', folder)
        except OSError:
            if not os.path.isdir(folder):  # another run was faster
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def folder_of_peers():
    """Makes the environment where it is missing; returns its folder."""
    try:
        with open(REQUIREMENTS, encoding='utf-8') as file:
            lines = [line.strip() for line in file
                     if line.strip() and not line.startswith('#')]
        digest = hashlib.sha256('\n'.join(lines).encode()).hexdigest()[:12]
        folder = os.path.join(cache_folder(), f'peers-{digest}')
        if not os.path.isdir(folder):
            make(folder, lines)
        return folder
    except OSError as error:
        raise SystemExit(f'peers: cannot make the environment: {error}') from None
