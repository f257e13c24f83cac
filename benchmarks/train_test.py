#!/usr/bin/python3
"""Do the ways of benchmarks/train train one model? usage: train_test.py TRAIN"""
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest

SIZES = {'dim': 32, 'layers': 2, 'heads': 2, 'seq': 16, 'steps': 5}
CONFIG = {
    'train_micro_batch_size_per_gpu': 3,
    'gradient_clipping': 0,
    'zero_optimization': {'stage': 1},
    'optimizer': {'type': 'AdamW',
                  'params': {'lr': 1e-3, 'weight_decay': 0.01}},
}


class TrainTest(unittest.TestCase):
    program = ''

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.text = self.write('text', 'And the evening and the morning. ' * 99)

    def write(self, name, text):
        path = os.path.join(self.folder, name)
        with open(path, 'w', encoding='utf-8') as file:
            file.write(text)
        return path

    def run_train(self, *flags):
        sizes = ['--%s=%d' % size for size in SIZES.items()]
        return subprocess.run(
            [self.program, '--data', self.text, *sizes, *flags], check=False,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def figures(self, *flags):
        done = self.run_train(*flags)
        self.assertEqual(done.returncode, 0, done.stderr)
        return json.loads(done.stdout.splitlines()[-1])

    def test_a_configuration_is_as_its_flags(self):
        file = self.write('c.json', json.dumps(CONFIG))
        by_file = self.figures('--config', file)
        by_flags = self.figures('--stage=1', '--micro_batch=3')
        for key in 'loss', 'stage', 'dtype', 'units':
            self.assertEqual(by_file[key], by_flags[key])
        self.assertEqual(len(by_file['loss']), SIZES['steps'])
        self.assertEqual(by_file['stage'], 1)
        bf16 = self.figures('--config', self.write('b.json', json.dumps(
            {**CONFIG, 'bf16': {'enabled': True}})))
        self.assertEqual(bf16['dtype'], 'bf16')
        self.assertNotEqual(bf16['loss'], by_file['loss'])

    def test_parameters_made_on_the_device(self):
        """On the CPU these are the same."""
        for engine in 'tessera', 'none':
            self.assertEqual(
                self.figures('--engine', engine, '--device_init')['loss'],
                self.figures('--engine', engine)['loss'])

    def test_a_model_in_bfloat16_is_the_engines(self):
        """The first loss to the bit; then updates are rounded in other ways."""
        ours = self.figures('--dtype=bf16', '--clip=1')['loss']
        plain = self.figures(
            '--engine=plain_bf16', '--dtype=bf16', '--clip=1')['loss']
        self.assertEqual(plain[0], ours[0])
        self.assertLess(plain[-1], plain[0] - 0.1)
        for a, b in zip(plain, ours):
            self.assertAlmostEqual(a, b, delta=0.02)
        autocast = self.figures('--engine=none', '--dtype=bf16')['loss']
        self.assertNotEqual(plain, autocast)

    def test_flops(self):
        figures = self.figures('--peak_tflops=0.001')
        expected = 6 * figures['params'] + 12 * math.prod(
            SIZES[name] for name in ('layers', 'dim', 'seq'))
        self.assertEqual(figures['flops_per_token'], expected)
        self.assertAlmostEqual(
            figures['mfu'] / (figures['tok_s'] * expected / 1e9), 1, delta=0.01)
        self.assertIsNone(self.figures()['mfu'])

    def test_flags_that_do_not_fit(self):
        file = self.write('c.json', json.dumps(CONFIG))
        for flags, words in (
                (['--config', file, '--stage=2'],
                 '--stage is not for --config, which says it itself'),
                (['--engine=none', '--micro_batches=2'],
                 '--micro_batches is not for --engine none'),
                (['--engine=none', '--config', file],
                 '--config is not for --engine none'),
                (['--engine=plain_bf16'],
                 '--engine plain_bf16: expected --dtype bf16'),
                (['--engine=fast'],
                 "--engine: expected tessera, none or plain_bf16, got 'fast'"),
                (['--peak_tflops=-1'], '--peak_tflops: expected 0 or more')):
            done = self.run_train(*flags)
            self.assertEqual(done.returncode, 1, flags)
            self.assertIn(words, done.stderr)


if __name__ == '__main__':
    TrainTest.program = os.path.abspath(sys.argv[1])
    unittest.main(argv=sys.argv[:1], verbosity=2)
