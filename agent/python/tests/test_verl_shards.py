"""verl's shard export of real FSDP2 ranks: what lies in shared memory is what they hold, in bfloat16."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).parent
MISSING = [name for name in ("torch", "verl") if importlib.util.find_spec(name) is None]


@unittest.skipIf(MISSING, f"{' and '.join(MISSING)} is not installed: `make test-torch` fetches it and runs this")
class Exported(unittest.TestCase):
    def ranks(self, mode, world):
        with tempfile.TemporaryDirectory() as directory:
            command = [sys.executable, str(HERE / "verl_rank.py"), mode]
            processes = [
                subprocess.Popen([*command, str(rank), str(world), f"{directory}/group"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for rank in range(world)
            ]
            for process in processes:
                self.addCleanup(process.kill)
            ended = [(process.communicate(), process.returncode) for process in processes]
        for (_, error), code in ended:
            self.assertEqual(code, 0, error)
        return [json.loads(out) for (out, _), _ in ended]

    def test_shards_are_those_of_the_module_and_tied_parameters_are_there_once(self):
        for mode, world in (("fsdp", 3), ("hsdp", 4), ("tp", 4)):
            for rank, told in enumerate(self.ranks(mode, world)):
                with self.subTest(mode=mode, rank=rank):
                    self.assertEqual((told["wrong"], told["tensors"], told["dtypes"]), ([], 6, ["bf16"]))
                    self.assertEqual(told["copied"], told["bytes"])
                    for case in ("placed", "fused"):
                        self.assertRegex(told[case], "LayoutRejected: verl exports `embed.weight` as a part")
                    self.assertRegex(told["larger"], "`embed.weight` has .* elements here, its placements say")
                    self.assertRegex(told["changed"], "PointerMoved: verl exports")


if __name__ == "__main__":
    unittest.main()
