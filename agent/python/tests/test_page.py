"""Runs the blocks of docs/python.md as they stand, each as a process of its own with the socket in its environment."""

import os
import pathlib
import re
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
from tiny import REPLICA_RANKS, TRAINING_RANKS, replica_names  # noqa: E402

BLOCKS = dict(re.findall(r"```python (\w+)\n(.*?)```", (fleet.ROOT / "docs/python.md").read_text(), re.S))
STEPS = 2

TRAINER = """
import sys; sys.path[:0] = {path!r}
from tiny import SHAPES, full, training_part
rank, world, steps = {rank}, "w1", {steps}
shapes = {{name: training_part(tensor, rank).shape for name, tensor in full(0).items()}}
def train(step, placed):
    tensors = full(step)
    for p in placed:
        p.buffer[:] = training_part(tensors[p.tensor.name], rank).tobytes()
"""

ENGINE = """
import sys; sys.path[:0] = {path!r}
import numpy as np
from tiny import full, inference_part
rank, pool, replica, steps = {rank}, "default", {replica!r}, {steps}
shapes = {{name: part.shape for name, part in inference_part(full(0), rank).items()}}
live = {{name: bytearray(2 * int(np.prod(shape))) for name, shape in shapes.items()}}
"""

ENGINE_CHECK = """
for name, part in inference_part(full(steps), rank).items():
    assert bytes(live[name]) == part.tobytes(), name
"""

DRIVER = """
import sys; sys.path[:0] = {path!r}
steps = {steps}
"""

TORCH = """
import sys; sys.path[:0] = {path!r}
import os, tempfile, torch
rank, steps = 0, {steps}
group = tempfile.mkdtemp() + "/group"
torch.distributed.init_process_group("gloo", init_method="file://" + group, rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
def train(step, model):
    with torch.no_grad():
        model.weight.fill_(step)
"""


def command(template, block, check="", **values):
    # As a user's program logs: tests quieten the client.
    loud = "\nimport logging; logging.getLogger('weightrefit').handlers.clear()\n"
    path = [str(pathlib.Path(__file__).parent), str(fleet.ROOT / "agent/python")]
    return [sys.executable, "-u", "-c", template.format(path=path, steps=STEPS, **values) + loud + BLOCKS[block] + check]


class Page(fleet.FleetTest):
    def start(self, command, seat):
        env = dict(os.environ, WEIGHTREFIT_SOCKET=self.fleet.socket_of(seat))
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        return process

    def test_its_trainer_engine_and_driver_refit_each_other(self):
        seats = [("trainer", TRAINER, "", f"training/{rank}", {"rank": rank}) for rank in range(TRAINING_RANKS)]
        (replica,) = replica_names(self.fleet)
        for rank in range(REPLICA_RANKS):
            seat = f"inference/default/{replica}/{rank}"
            seats.append(("engine", ENGINE, ENGINE_CHECK, seat, {"rank": rank, "replica": replica}))
        seats.append(("driver", DRIVER, "", "training/0", {}))
        followed = self.start(command(DRIVER, "events"), "training/0")
        self.assertEqual(followed.stdout.readline(), "epoch 1 with 1 replicas\n")
        processes = []
        for block, template, check, seat, values in seats:
            processes.append(self.start(command(template, block, check, **values), seat))
        for process, (_, _, _, seat, _) in zip(processes, seats):
            out, error = process.communicate(timeout=fleet.PATIENCE)
            self.assertEqual((process.returncode, error), (0, ""), seat)
        committed = [[str(step), "Committed"] for step in range(1, STEPS + 1)]
        self.assertEqual([line.split()[:2] for line in out.splitlines()], committed)
        out, error = followed.communicate(timeout=fleet.PATIENCE)
        self.assertEqual((followed.returncode, error), (0, ""))
        self.assertEqual([line.split() for line in out.splitlines()], committed)


class WithoutAgent(unittest.TestCase):
    def test_its_blocks_do_nothing_where_there_is_no_socket(self):
        env = {name: value for name, value in os.environ.items() if name != "WEIGHTREFIT_SOCKET"}
        commands = [command(TRAINER, "trainer", rank=0), command(DRIVER, "driver"), command(DRIVER, "events")]
        try:
            import torch  # noqa: F401

            commands.append(command(TORCH, "torch"))
        except ImportError:
            pass
        for each in commands:
            done = subprocess.run(each, env=env, capture_output=True, text=True, timeout=fleet.PATIENCE)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stderr.count("WEIGHTREFIT_SOCKET is not set"), 1, done.stderr)


if __name__ == "__main__":
    unittest.main()
