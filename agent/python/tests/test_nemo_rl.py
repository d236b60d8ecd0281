"""NeMo RL's weight synchronizer on real agents; NeMo RL's workers are the actors of frameworks.py."""

import dataclasses
import inspect
import pathlib
import re
import sys
import types
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
from frameworks import HERE, EngineActor, FrameworkTest, Timer, TrainerActor, actor, nemo_rl, ray, tiny_rank  # noqa: E402

import weightrefit  # noqa: E402

sys.path.insert(0, str(HERE / "signatures"))
from write import signatures  # noqa: E402

BLOCKS = dict(re.findall(r"```python (\w+)\n(.*?)```", (fleet.ROOT / "docs/nemo-rl.md").read_text(), re.S))


class PolicyActor(TrainerActor):
    """A policy worker, which has an event loop too."""


class SynchronousEngine:
    """NeMo RL's generation worker without `async_engine`: vLLM's `LLM`."""

    def __init__(self):
        self.llm = object()

    async def unused(self):
        """Makes it an actor with an event loop."""


class WhatNemoRlAsks(unittest.TestCase):
    def test_every_version_gets_all_its_methods_with_their_parameters(self):
        for version in ("nemo_rl_earlier", "nemo_rl_later"):
            adapter = nemo_rl(version)
            (base,) = adapter.WeightrefitSynchronizer.__bases__
            made = adapter.WeightrefitSynchronizer(None, None)
            self.assertIsInstance(made, base)
            for name in base.__abstractmethods__:
                asked, given = (inspect.getattr_static(cls, name) for cls in (base, adapter.WeightrefitSynchronizer))
                with self.subTest(version=version, method=name):
                    self.assertIs(type(asked), type(given))
                    if not isinstance(asked, property):
                        shape = [[(p.name, p.kind, p.default) for p in inspect.signature(f).parameters.values()] for f in (asked, given)]
                        self.assertEqual(*shape)

    def test_what_is_written_down_is_what_the_script_writes(self):
        for file in (HERE / "signatures").glob("nemo_rl_*.py"):
            origin = file.read_text().splitlines()[1].removeprefix("# ")
            self.assertEqual(signatures(file.read_text(), origin), file.read_text())


class Refits(FrameworkTest):
    def setUp(self):
        super().setUp()
        self.workers = self.trainers(PolicyActor)
        group = types.SimpleNamespace
        self.policy = group(worker_group=group(workers=self.workers))
        # Of two workers for each engine the first owns it, as with tensor parallelism.
        owners = [worker for engine in self.engines for worker in (engine, None)]
        self.generation = group(worker_group=group(workers=owners), dp_size=len(self.engines), weight_synchronizer=None)

    def synchronizer(self, **options):
        options = {"rank": tiny_rank, "timeout": fleet.PATIENCE} | options
        made = nemo_rl().WeightrefitSynchronizer(self.policy, self.generation, **options)
        self.addCleanup(made.shutdown)
        return made

    def train(self, step):
        ray.get([worker.train.remote(step) for worker in self.workers])

    def test_what_the_policy_holds_is_served_and_the_numbers_are_those_of_the_round(self):
        synchronizer, timer = self.synchronizer(), Timer()
        synchronizer.init_communicator()
        self.assertTrue(synchronizer.is_stale)
        for step in (1, 2):
            self.train(step)
            synchronizer.mark_stale()
            numbers = synchronizer.sync_weights(timer=timer)
            self.assertFalse(synchronizer.is_stale)
            self.assert_served(step)
            self.assertEqual(numbers["weightrefit/replicas_serving"], 2)
            self.assertGreater(numbers["weightrefit/bytes_received"], 0)
            self.assertIn("weightrefit/transfer_seconds", numbers)
            self.assertEqual({type(number) for number in numbers.values()}, {float})
        self.assertEqual(timer.labels, ["prepare_for_generation/transfer_and_update_weights"] * 2)
        settings, _ = ray.get(self.engines[1].told.remote())
        self.assertEqual(settings, ("default", "default-1"))

    def test_a_refit_that_fails_is_a_runtime_error_that_says_where_and_the_next_one_mends_it(self):
        synchronizer = self.synchronizer()
        synchronizer.init_communicator()
        self.train(1)
        synchronizer.sync_weights()
        ray.get(self.engines[0].break_next.remote("apply"))
        self.train(2)
        with self.assertRaisesRegex(RuntimeError, "hint: ") as raised:
            synchronizer.sync_weights()
        cause = raised.exception.__cause__
        self.assertIsInstance(cause, weightrefit.RefitFailed)
        self.assertEqual((cause.code, cause.report.step), ("ApplyFailed", 2))
        self.assertEqual([replica.replica for replica in cause.report.left_out], ["default-0"])
        self.assertTrue(synchronizer.is_stale)
        self.train(3)
        synchronizer.sync_weights()
        self.assert_served(3)

    def test_a_step_whose_end_was_not_waited_for_does_not_hinder_the_next(self):
        synchronizer = self.synchronizer()
        synchronizer.init_communicator()
        patient = synchronizer._options
        synchronizer._options = dataclasses.replace(patient, timeout=0.0)
        self.train(1)
        with self.assertRaises(RuntimeError) as raised:
            synchronizer.sync_weights()
        self.assertIsInstance(raised.exception.__cause__, weightrefit.DeadlineExceeded)
        synchronizer._options = patient
        self.train(2)
        synchronizer.sync_weights()
        self.assert_served(2)

    def test_scales_of_a_key_value_cache_are_refused_and_nothing_is_published(self):
        synchronizer = self.synchronizer()
        synchronizer.init_communicator()
        with self.assertRaisesRegex(RuntimeError, "kv_cache_dtype") as raised:
            synchronizer.sync_weights(kv_scales={"model.layers.0.self_attn.k_scale": 0.5})
        self.assertEqual(raised.exception.__cause__.code, "Unsupported")
        self.assertTrue(synchronizer.is_stale)
        self.train(1)
        synchronizer.sync_weights(kv_scales={})
        self.assert_served(1)

    def test_who_cannot_take_part_is_named_before_anything_is_published(self):
        self.generation.worker_group.workers = [actor(self, SynchronousEngine)]
        self.generation.dp_size = 1
        with self.assertRaisesRegex(RuntimeError, "asynchronous engine"):
            self.synchronizer().init_communicator()
        self.generation.worker_group.workers, self.generation.dp_size = self.engines, 2
        with self.assertRaisesRegex(RuntimeError, "this agent hosts inference/default"), self.assertLogs("weightrefit"):
            self.synchronizer(replica="other-{number}").init_communicator()

    def test_a_worker_or_an_engine_without_an_agent_is_named(self):
        worker, engine = actor(self, PolicyActor, 2, None), actor(self, EngineActor, None)
        self.generation.worker_group.workers = [self.engines[0], engine]
        with self.assertRaisesRegex(RuntimeError, "inference/default/default-1.*WEIGHTREFIT_SOCKET is not set"):
            self.synchronizer().init_communicator()
        self.generation.worker_group.workers = self.engines
        self.workers[2] = worker
        with self.assertRaisesRegex(RuntimeError, "training/2.*WEIGHTREFIT_SOCKET is not set") as raised:
            self.synchronizer().init_communicator()
        self.assertEqual(raised.exception.__cause__.code, "NotConfigured")

    def test_the_lines_of_the_page_refit(self):
        names = {"policy": self.policy, "policy_generation": self.generation, "tiny_rank": tiny_rank}
        block = BLOCKS["setup"].replace("(policy, policy_generation", "(policy, policy_generation, rank=tiny_rank")
        nemo_rl()
        exec(block, names)
        self.addCleanup(self.generation.weight_synchronizer.shutdown)
        self.train(1)
        self.generation.weight_synchronizer.sync_weights(timer=None, kv_scales=None)
        self.assert_served(1)


if __name__ == "__main__":
    unittest.main()
