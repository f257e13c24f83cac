"""Our own programs, and the text that they train on."""
import os
import subprocess

import peer_env
import results
import turns


def build(targets):
    """Returns the folder with the programs."""
    name = turns.PROGRAM
    print(f'{name}: building //benchmarks', flush=True)
    done = subprocess.run(
        ['bazel', 'build', '--noshow_progress',
         *(target if target.startswith('//') else f'//benchmarks:{target}'
           for target in targets)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit('\n'.join([*done.stderr.splitlines()[-30:],
                                    f'{name}: the build failed, see above']))
    return os.path.join(peer_env.output_of('bazel', 'info', 'bazel-bin'),
                        'benchmarks')


def corpus():
    """The King James Bible, as ./demo keeps it."""
    folder = peer_env.cache_folder()
    path = os.path.join(folder, 'kjv.txt')
    if not os.path.exists(path):
        text = peer_env.output_of('bible', '-f', 'gen1:1-rev22:21') + '\n'
        results.write(path, text)
    return path
