#!/usr/bin/python3
"""Does tools/torch_to_safetensors.py read what torch and DeepSpeed write?

tools/testdata has what torch 2.11 and DeepSpeed 0.19.8 wrote (make_samples.py).
"""

import os
import shutil
import subprocess
import sys
import unittest

sys.path.insert(0, "tools")
sys.dont_write_bytecode = True
from torch_test_files import (  # pylint: disable=wrong-import-position
    TOOL, Case, expected_bytes, state_pickle, tensor_pickle, torch_zip)

STATE = {
    "0.weight": ("F32", [2, 3]), "0.bias": ("F32", [2]), "1.weight": ("F32", [2]),
    "1.bias": ("F32", [2]), "1.running_mean": ("F32", [2]),
    "1.running_var": ("F32", [2]), "1.num_batches_tracked": ("I64", []),
    "bfloat16": ("BF16", [2, 3]), "float16": ("F16", [2, 3]),
    "float64": ("F64", [2, 3]), "int32": ("I32", [2, 3]), "int16": ("I16", [2, 3]),
    "int8": ("I8", [2, 3]), "uint8": ("U8", [2, 3]), "uint16": ("U16", [2, 3]),
    "bool": ("BOOL", [2, 3]), "tied.key": ("F32", [2, 3]), "rows": ("F32", [2, 4]),
    "columns": ("BF16", [3, 2]), "transposed": ("F32", [3, 4]),
    "permuted": ("F16", [2, 3, 4]), "parameter": ("F32", [3]),
    "marked": ("F32", [3]), "empty": ("F32", [0, 3])}
DCP = {"weight": ("F32", [5, 3]), "columns": ("BF16", [3, 5]),
       "transposed": ("F32", [3, 4]), "short": ("F32", [1])}
UNIVERSAL = {"a.weight": ("F32", [5, 3]), "b.weight": ("F32", [5, 3]),
             "count": ("I64", [])}


class Samples(Case):
    def test_torch_save(self):
        values, said = self.convert(self.samples + "state.pt", "--prefix", "model.")
        self.check_values(STATE, values)
        self.assertIn("names without the prefix", said)
        values, said = self.convert(self.samples + "state.pt")
        self.check_values(STATE, values, "model.")
        self.assertIn("left out: 3 optimizer states ('exp_avg', 'exp_avg_sq', 'step'),",
                      said)
        values, _ = self.convert(self.samples + "state.pt",
                                 "--prefix=optimizer.state.0.")
        self.assertEqual({"exp_avg", "exp_avg_sq", "step"}, set(values))

    def test_folder_of_bin_files(self):
        for i in (1, 2):
            shutil.copy(self.samples + "state.pt",
                        self.path(f"pytorch_model-0000{i}-of-00002.bin"))
        self.refuse("a name of its own", self.folder)
        self.write(torch_zip(state_pickle(tensor_pickle())),
                   "pytorch_model-00002-of-00002.bin")
        values, _ = self.convert(self.folder)
        self.assertEqual(len(STATE) + 1, len(values))
        os.remove(self.path("pytorch_model-00001-of-00002.bin"))
        self.refuse("expected the 00002 files", self.folder)

    def test_dcp(self):
        values, said = self.convert(self.samples + "dcp", "--prefix", "model.")
        self.check_values(DCP, values)
        values, said = self.convert(self.samples + "dcp")
        self.check_values(DCP, values, "model.")
        self.assertIn("2 optimizer states ('exp_avg', 'step'), 2 values that are no "
                      "tensors", said)
        values, _ = self.convert(self.samples + "dcp", "--prefix=optim.state.weight.")
        self.assertEqual(expected_bytes("exp_avg", "F32", [5, 3]), values["exp_avg"][2])

    def test_universal(self):
        for stage in "13":
            values, said = self.convert(self.samples + "universal" + stage)
            # zero/count/fp32.pt has the buffer, too, as float32.
            self.check_values(UNIVERSAL, values)
            self.assertIn("optimizer states ('exp_avg', 'exp_avg_sq'", said)
        values, _ = self.convert(self.samples + "universal1", "--prefix",
                                 "optim.state.a.weight.")
        self.assertEqual(expected_bytes("exp_avg", "F32", [5, 3]), values["exp_avg"][2])
        # What stage 1 has of the other name of a tied weight is its bfloat16 value.
        shutil.copy(self.samples + "universal1/zero/count/fp32.pt",
                    self.samples + "universal1/zero/b.weight/fp32.pt")
        values, _ = self.convert(self.samples + "universal1")
        self.assertEqual(values["a.weight"][2], values["b.weight"][2])
        # Flat, as the ranks of stage 3 held it.
        values, _ = self.convert(self.samples + "universal3", "--prefix",
                                 "optim.state.a.weight.")
        self.assertEqual([5, 3], values["exp_avg"][1])

    def test_universal_that_lacks_something(self):
        folder = self.path("u")
        shutil.copytree(self.samples + "universal3", folder)
        os.remove(folder + "/zero_pp_rank_0_mp_rank_00_model_states.pt")
        self.refuse("no *_model_states.pt of the folder has its shape", folder)
        shutil.rmtree(folder)
        shutil.copytree(self.samples + "universal1", folder)
        os.remove(folder + "/zero/a.weight/fp32.pt")
        self.refuse("has no 'a.weight'", folder)

    def test_tessera_imports_it(self):
        subprocess.run([TOOL, self.samples + "state.pt", self.out, "--prefix=model."],
                       check=True)
        subprocess.run(["tools/tessera", "checkpoint", "import", self.out,
                        self.path("c")], check=True)
        shown = subprocess.run(["tools/tessera", "checkpoint", "show",
                                self.path("c")], check=True, capture_output=True)
        self.assertIn(b"columns [3, 2]: value BF16", shown.stdout)


if __name__ == "__main__":
    sys.exit(unittest.main(verbosity=2))
