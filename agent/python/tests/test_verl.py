"""verl's checkpoint engine registry and manager, the real ones, on real agents; its workers are the actors of
frameworks.py."""

import asyncio
import inspect
import pathlib
import re
import sys
import types
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
import yaml  # noqa: E402
from frameworks import VERL, FrameworkTest, TrainerActor, actor, ray, tiny_rank, verl  # noqa: E402

import weightrefit  # noqa: E402

PAGE = (fleet.ROOT / "docs/verl.md").read_text()
SETTINGS = yaml.safe_load(re.search(r"```yaml settings\n(.*?)```", PAGE, re.S)[1])["actor_rollout_ref"]["rollout"]

needs_verl = unittest.skipIf(VERL is None, "verl is not installed: tests/requirements-alone.txt has it")


class ActorWorker(TrainerActor):
    """verl's actor worker: its own shards, or tensors that are gathered one by one."""

    def __init__(self, rank, socket, options):
        super().__init__(rank, socket)
        adapter = verl()
        cls = adapter.CheckpointEngineRegistry.get("weightrefit")

        class TinyCheckpointEngine(cls):
            def training_rank(self, engine):
                return tiny_rank(engine)

        self.checkpoint_engine = TinyCheckpointEngine(is_master=rank == 0, bucket_size=1 << 20, **options)

    def get_per_tensor_param_shard(self):
        raise AssertionError("tiny_rank takes what it needs")

    async def update_weights(self, global_steps=None, mode="auto"):
        """The branch of verl's that is taken for any other backend than its `naive`."""
        weights = self if mode == "delta_sharded" else iter([("w", None)])
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps) or {}

    async def execute_checkpoint_engine(self, method, *arguments):
        return getattr(self.checkpoint_engine, method)(*arguments)


class WorkerGroup:
    """All actor workers: each method is called on all of them."""

    def __init__(self, workers):
        self.workers, self.world_size = workers, len(workers)

    def update_weights(self, **named):
        return [worker.update_weights.remote(**named) for worker in self.workers]


@needs_verl
class WhatVerlAsks(unittest.TestCase):
    def test_the_backend_is_registered_and_has_all_methods_with_their_parameters(self):
        adapter = verl()
        cls = adapter.CheckpointEngineRegistry.get(SETTINGS["checkpoint_engine"]["backend"])
        self.assertIs(cls, adapter.WeightrefitCheckpointEngine)
        base = adapter.CheckpointEngine
        self.assertTrue(base.__abstractmethods__)
        for name in base.__abstractmethods__:
            with self.subTest(name):
                asked, given = (inspect.signature(getattr(each, name)).parameters for each in (base, cls))
                self.assertEqual([(p.name, p.kind, p.default) for p in asked.values()], [(p.name, p.kind, p.default) for p in given.values()])
        made = adapter.CheckpointEngineRegistry.new("weightrefit", bucket_size=1 << 20, is_master=True, wait="quorum:1")
        self.assertIsInstance(made, base)
        self.assertEqual((made.prepare(), cls.build_topology(3, 4, []), made.init_process_group(), made.finalize()), ({}, ({}, {}), None, None))
        with self.assertRaises(TypeError):
            adapter.CheckpointEngineRegistry.new("weightrefit", bucket_size=1, waits="all")

    def test_verl_hands_over_the_training_engine_in_the_mode_that_is_asked_for(self):
        worker = (VERL / "workers/engine_workers.py").read_text()
        branch = re.search(r'if effective_mode == "(\w+)":(?:\s*#.*)*\s*metrics = await self.checkpoint_engine.send_weights\((.*)\)', worker)
        self.assertEqual(branch.groups(), (verl()._WITH_ENGINE, "self.actor.engine, global_steps=global_steps"))
        for method in ("get_per_tensor_param_shard", "get_per_tensor_param"):
            self.assertIn(f"def {method}(", (VERL / "workers/engine/base.py").read_text())
        for method in ("async def set_global_steps(self, global_steps: int)", "self.engine = engine_client"):
            self.assertIn(method, (VERL / "workers/rollout/vllm_rollout/vllm_async_server.py").read_text())

    def test_gathered_tensors_are_refused_on_both_sides(self):
        made = verl().WeightrefitCheckpointEngine(bucket_size=1)

        async def receive():
            async for _ in made.receive_weights(global_steps=1):
                pass

        for awaited in (made.send_weights(iter([]), global_steps=1), receive()):
            with self.assertRaisesRegex(weightrefit.Misuse, "checkpoint_manager_class to weightrefit.integrations.verl.WeightrefitManager"):
                asyncio.run(awaited)


@needs_verl
class Refits(FrameworkTest):
    def setUp(self):
        super().setUp()
        self.manager, self.workers = self.made()

    def made(self):
        """By the settings of the page, as verl makes it of them."""
        verl()
        settings = SETTINGS["checkpoint_engine"]
        options = settings["engine_kwargs"]["weightrefit"] | {"timeout": fleet.PATIENCE}
        config = types.SimpleNamespace(**settings | {"engine_kwargs": {"weightrefit": options}})
        cls = sys.modules["verl.utils.import_utils"].load_class_from_fqn(SETTINGS["checkpoint_manager_class"])
        workers = self.trainers(ActorWorker, options)
        replicas = [types.SimpleNamespace(servers=[engine]) for engine in self.engines]
        return cls(config=config, actor_wg=WorkerGroup(workers), replicas=replicas), workers

    def train(self, step):
        ray.get([worker.train.remote(step) for worker in self.workers])

    def test_a_step_of_the_actor_is_served_by_all_replicas_and_its_numbers_come_back(self):
        for step in (0, 1):
            self.train(step)
            numbers = self.manager.update_weights(step)
            self.assert_served(step)
            self.assertEqual(numbers["weightrefit/replicas_serving"], 2)
            self.assertGreater(numbers["weightrefit/bytes_received"], 0)
            told = ray.get([engine.told.remote() for engine in self.engines])
            self.assertEqual([global_steps for _, global_steps in told], [step, step])
        # verl asks again after a validation; the weights are what they were.
        self.assertEqual((self.manager.update_weights(1), self.manager.update_weights()), ({}, {}))

    def test_a_driver_with_an_event_loop_awaits_it(self):
        async def loop():
            return await self.manager.update_weights(global_steps=4)

        self.train(4)
        self.assertIn("weightrefit/commit_seconds", asyncio.run(loop()))
        self.assert_served(4)

    def test_a_refit_that_fails_ends_the_step_with_its_reason_and_the_next_step_mends_it(self):
        self.train(1)
        self.manager.update_weights(1)
        ray.get(self.engines[1].break_next.remote("apply"))
        self.train(2)
        with self.assertRaises(weightrefit.RefitFailed) as raised:
            self.manager.update_weights(2)
        self.assertEqual((raised.exception.code, raised.exception.report.step), ("ApplyFailed", 2))
        self.train(3)
        self.manager.update_weights(3)
        self.assert_served(3)

    def test_the_lines_of_the_page_make_the_same_manager(self):
        names = {"checkpoint_engine_config": self.manager.config, "actor_wg": self.manager.actor_wg, "replicas": self.manager.replicas}
        exec(re.search(r"```python manager\n(.*?)```", PAGE, re.S)[1], names)
        self.train(1)
        names["manager"].update_weights(1)
        self.assert_served(1)

    def test_replicas_that_are_added_are_registered_and_none_is_removed(self):
        manager, (first, second) = self.manager, self.manager.replicas
        manager.replicas = [first]
        self.train(1)
        numbers = manager.update_weights(1)
        self.assertEqual(numbers["weightrefit/replicas_serving"], 1)
        manager.add_replicas([second])
        self.train(2)
        manager.update_weights(2)
        self.assert_served(2)
        with self.assertRaisesRegex(weightrefit.Misuse, "cannot be removed"):
            manager.remove_replicas([second])


if __name__ == "__main__":
    unittest.main()
