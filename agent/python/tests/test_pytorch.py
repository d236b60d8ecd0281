"""Real FSDP2 over gloo: what a rank registers, and what arrives in bf16 engines through real agents."""

import contextlib
import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402

import numpy as np  # noqa: E402
import yaml  # noqa: E402
from fleet import together  # noqa: E402
from tiny import REPLICA_RANKS, SHAPES, EngineRank, inference_part, replica_names  # noqa: E402

import weightrefit  # noqa: E402

try:
    import torch
except ImportError:
    torch = None
else:
    from weightrefit import pytorch

needs_torch = unittest.skipIf(torch is None, "torch is not installed: `make test-torch` fetches it and runs this")

RANK = pathlib.Path(__file__).parent / "torch_rank.py"

# Sharding of the training side -> ranks, and the training part of the resource.
MODES = {
    "fsdp": (3, {"dp_shard": 3}, ["dp_shard"]),
    "hsdp": (4, {"dp_shard": 2, "dp_replicate": 2}, ["dp_shard", "dp_replicate"]),
    "tp": (4, {"tp": 2, "dp_shard": 2}, ["tp", "dp_shard"]),
}


class Ranks:
    """All training ranks, as processes."""

    def __init__(self, test, mode, sockets=None):
        world = MODES[mode.partition("-")[0]][0]
        directory = tempfile.TemporaryDirectory()
        test.addCleanup(directory.cleanup)
        self.file = f"{directory.name}/group"
        self.processes = []
        for rank in range(world):
            command = [sys.executable, str(RANK), mode, str(rank), str(world), self.file]
            command += [sockets[rank]] if sockets else []
            with open(f"{self.file}.{rank}.log", "wb") as log:
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
            self.processes.append(process)
        test.addCleanup(self.end)

    def ready(self):
        return together(*(lambda rank=rank: self.answer(rank) for rank in range(len(self.processes))))

    def tell(self, line):
        for process in self.processes:
            process.stdin.write(line + "\n")
            process.stdin.flush()

    def ask(self, line):
        self.tell(line)
        return self.ready()

    def full(self, step):
        with np.load(f"{self.file}.{step}.npz") as arrays:
            return dict(arrays)

    def answer(self, rank):
        line = self.processes[rank].stdout.readline()
        if not line:
            log = pathlib.Path(f"{self.file}.{rank}.log").read_text(errors="replace")
            raise AssertionError(f"training rank {rank} ended with {self.processes[rank].wait()}:\n{log}")
        return json.loads(line)

    def end(self):
        """They leave the process group together."""
        for process in self.processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(fleet.PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


@needs_torch
class Registered(unittest.TestCase):
    """Without an agent: `WEIGHTREFIT_SOCKET` is unset in the ranks."""

    def check(self, mode):
        ranks = Ranks(self, mode)
        self.assertEqual(set(ranks.ready()), {"ready"})
        told = ranks.ask("check")
        # Storages are as large as the largest shard: where one is smaller, FSDP2 pads.
        largest = 4 * max(math.prod(shape) for one in told for shape in one["shapes"])
        for one in told:
            self.assertEqual(sorted(one["names"]), sorted(SHAPES))
            self.assertEqual(one["aliases"], {"head.weight": "embed.weight"})
            self.assertEqual(one["differing"], 0, "bytes in shared memory, before and after a training step")
            self.assertEqual(one["boxes_that_torch_has_too"], len(SHAPES))
            for seen in (one, one["later"]):
                self.assertEqual(seen["collectives"], 0)
                # What is whole can only come from others.
                self.assertLessEqual(seen["largest"], largest, "nothing larger than a shard is made")
            self.assertEqual([tuple(shape) for shape in one["whole"]], [SHAPES[name] for name in one["names"]])
        return told

    def assert_covered(self, told, copies):
        elements = sum(math.prod(shape) for one in told for shape in one["shapes"])
        self.assertEqual(elements, sum(copies(name) * math.prod(shape) for name, shape in SHAPES.items()))

    def test_uneven_shards_of_fsdp2_are_registered_without_their_padding(self):
        told = self.check("fsdp")
        self.assert_covered(told, lambda name: 1)
        at = told[0]["names"].index("embed.weight")
        self.assertEqual([one["shapes"][at] for one in told], [[667, 256], [667, 256], [666, 256]])
        self.assertEqual([one["starts"][at] for one in told], [[0, 0], [667, 0], [1334, 0]])
        self.assertGreater(told[2]["padded_bytes"], told[2]["bytes"], "the last rank pads in memory")
        for one in told:
            self.assertEqual((one["copied"], one["stale_before_the_snapshot"]), (one["bytes"],) * 2)

    def test_replicas_of_hsdp_each_hold_a_whole_copy(self):
        self.assert_covered(self.check("hsdp"), lambda name: 2)

    def test_fsdp2_over_tensor_parallelism_cuts_what_is_left(self):
        told = self.check("tp")
        tp = ("q", "k", "v", "o")
        self.assert_covered(told, lambda name: 1 if name.split(".")[-2] in tp else 2)
        names = told[0]["names"]
        columns, rows = names.index("layers.0.q.weight"), names.index("layers.0.o.weight")
        # Mesh (dp, tp): rank = dp * 2 + tp. Tensor parallelism cuts first.
        self.assertEqual([one["starts"][columns] for one in told], [[0, 0], [128, 0], [64, 0], [192, 0]])
        self.assertEqual([one["starts"][rows] for one in told], [[0, 0], [0, 128], [128, 0], [128, 128]])

    def test_adopted_parameters_live_in_shared_memory_and_nothing_is_copied(self):
        for mode in ("fsdp-adopt", "tp-adopt"):
            with self.subTest(mode):
                for one in self.check(mode):
                    self.assertEqual((one["copied"], one["stale_before_the_snapshot"]), (0, 0))


@needs_torch
class Arrived(unittest.TestCase):
    def resource(self, mode):
        """tests/local/tiny.yaml with this training side."""
        world, sizes, axes = MODES[mode]
        refit, *others = yaml.safe_load_all((fleet.ROOT / "tests/local/tiny.yaml").read_text())
        training = refit["spec"]["training"]
        training["worldSize"] = world
        layout = training["layout"]["inline"]
        layout.update(sizes=sizes, world=world, grids={"all": axes})
        shard = {"dim": 0, "by": "dp_shard", "kind": "chunk"}
        if mode == "tp":
            column, row = ({"dim": dim, "by": "tp", "kind": "chunk"} for dim in (0, 1))
            layout["rules"] = [
                {"hf": r"(?P<n>layers\.0\.[qkv]\.weight)", "to": "{n}", "cut": [column, shard]},
                {"hf": r"(?P<n>layers\.0\.o\.weight)", "to": "{n}", "cut": [row, shard]},
                *layout["rules"],
            ]
        file = tempfile.NamedTemporaryFile("w", suffix=".yaml")
        self.addCleanup(file.close)
        yaml.safe_dump_all([refit, *others], file)
        file.flush()
        return file.name

    def run_steps(self, mode, steps):
        sharding = mode.partition("-")[0]
        of = fleet.Fleet(self.resource(sharding))
        self.addCleanup(of.close)
        ranks = Ranks(self, mode, [of.socket_of(f"training/{rank}") for rank in range(MODES[sharding][0])])
        engines = [EngineRank(of, replica_names(of)[0], rank) for rank in range(REPLICA_RANKS)]
        refit = weightrefit.Refit(socket=of.socket_of("training/0"))
        for client in [refit, *(rank.client for rank in engines)]:
            self.addCleanup(client.close)
        together(ranks.ready, *(rank.register for rank in engines))
        seen = []
        for step in steps:
            told = ranks.ask(f"step {step}")
            self.assertEqual({one["outcome"] for one in told}, {"Read"})
            report = refit.sync(step, timeout=fleet.PATIENCE)
            self.assertEqual(report.outcome, "Committed")
            full = ranks.full(step)
            for rank in engines:
                rank.client.wait_served(step, fleet.PATIENCE)
                for name, want in inference_part(full, rank.rank).items():
                    self.assertEqual(np.count_nonzero(rank.live[name] != want), 0, (step, name))
            seen.append(full["layers.0.q.weight"])
        self.assertFalse(np.array_equal(seen[0], seen[-1]), "training changes weights")

    def test_every_element_of_a_bf16_engine_is_that_of_the_fp32_shards(self):
        for mode in ("fsdp", "fsdp-adopt", "hsdp", "tp"):
            with self.subTest(mode):
                self.run_steps(mode, (1, 2, 3))


@needs_torch
class Modules(unittest.TestCase):
    """One process, plain tensors."""

    def test_buffers_that_a_checkpoint_has_are_registered_and_others_are_not(self):
        module = torch.nn.BatchNorm1d(3)
        module.register_buffer("scratch", torch.zeros(5), persistent=False)
        shards = pytorch.Shards(module)
        self.assertEqual([s.tensor.name for s in shards.shards], list(module.state_dict()))
        self.assertEqual(shards.shards[-1].tensor, weightrefit.Tensor("num_batches_tracked", "i64", ()))

    def test_names_are_those_of_the_checkpoint_or_as_renamed(self):
        inner = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False))
        compiled = torch.nn.Module()
        compiled._orig_mod = inner  # what torch.compile puts around a module
        for module, rename, names in [
            (inner, str, ["0.weight", "1.weight"]),
            (compiled, str, ["0.weight", "1.weight"]),
            (inner, lambda name: f"model.{name}", ["model.0.weight", "model.1.weight"]),
        ]:
            shards = pytorch.Shards(module, rename=rename)
            self.assertEqual([s.tensor.name for s in shards.shards], names)
        with self.assertRaisesRegex(weightrefit.Misuse, "two tensors of the module are named `weight`"):
            pytorch.Shards(inner, rename=lambda name: "weight")

    def test_every_dtype_travels_and_adoption_keeps_views(self):
        module = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.arange(6).to(dtype), requires_grad=False) for dtype, name in pytorch._DTYPES.items()})
        for adopt in (False, True):
            shards = pytorch.Shards(module, adopt=adopt)
            self.assertEqual(shards.snapshot(), 0 if adopt else sum(s.tensor.nbytes for s in shards.shards))
            for placed in shards.placed:
                want = module[placed.tensor.name].detach().view(torch.uint8).numpy().tobytes()
                self.assertEqual(bytes(placed.buffer), want, placed.tensor.name)

    def test_a_storage_that_two_tensors_share_moves_once(self):
        whole = torch.arange(8, dtype=torch.float32)
        parts = [torch.nn.Parameter(part, requires_grad=False) for part in (whole[:4], whole[4:], whole.view(4, 2)[:, 1])]
        module = torch.nn.ParameterList(parts)
        shards = pytorch.Shards(module, adopt=True)
        self.assertEqual(shards.snapshot(), 16, "what is not contiguous is copied")
        whole.mul_(10)
        self.assertEqual(bytes(shards.placed[1].buffer), whole[4:].numpy().tobytes())
        self.assertEqual(shards.snapshot(), 16)
        self.assertEqual(bytes(shards.placed[2].buffer), whole[1::2].numpy().tobytes())

    def test_a_parameter_that_is_replaced_is_not_sent_as_it_was(self):
        module = torch.nn.Linear(2, 2)
        shards = pytorch.Shards(module)
        module.weight = torch.nn.Parameter(torch.ones(2, 2))
        with self.assertRaises(weightrefit.Misuse) as raised:
            shards.snapshot()
        self.assertEqual(raised.exception.code, "PointerMoved")
        self.assertIn("`weight`", raised.exception.message)

    def test_what_cannot_be_sent_is_named(self):
        module = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))})
        with self.assertRaisesRegex(weightrefit.Misuse, "`a` is stored as torch.complex64"):
            pytorch.Shards(module)

    def test_staging_is_copied_to_live_tensors_by_name(self):
        live = {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(0, 3)}
        tensors = pytorch.describe(live)
        placed = {placed.tensor.name: placed for placed in weightrefit.place(tensors)}
        want = torch.arange(6).to(torch.bfloat16).view(2, 3)
        placed["a"].buffer[:] = want.view(torch.uint8).numpy().tobytes()
        pytorch.copy_staging({name: p.buffer.toreadonly() for name, p in placed.items()}, live)
        self.assertTrue(torch.equal(live["a"], want))


if __name__ == "__main__":
    unittest.main()
