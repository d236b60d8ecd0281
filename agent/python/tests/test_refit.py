"""Python clients of real agents: three training ranks publish, engine ranks take, a driver awaits."""

import asyncio
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
import yaml  # noqa: E402
from fleet import together  # noqa: E402
from tiny import REPLICA_RANKS, TRAINING_RANKS, EngineRank, TrainerRank, replica_names  # noqa: E402

import weightrefit  # noqa: E402
from weightrefit import EngineState, InFlight, KvCache, Outcome  # noqa: E402

# Bytes that one replica needs: every element once in bf16, the norm on both ranks, no padding.
REPLICA_BYTES = 2 * (2000 * 256 + 4 * 256 * 256 + 2 * 256)


class RefitTest(fleet.FleetTest):
    """All clients of a fleet, registered."""

    def setUp(self):
        super().setUp()
        of = self.fleet
        self.trainers = [TrainerRank(of, rank) for rank in range(TRAINING_RANKS)]
        self.engines = [EngineRank(of, name, rank) for name in replica_names(of) for rank in range(REPLICA_RANKS)]
        self.refit = weightrefit.Refit(socket=of.socket_of("training/0"))
        for client in [self.refit, *(rank.client for rank in self.trainers + self.engines)]:
            self.addCleanup(client.close)
        together(*(rank.register for rank in self.trainers + self.engines))

    def publish(self, step):
        for rank in self.trainers:
            rank.publish(step)

    def released(self):
        return together(*(rank.wait_released for rank in self.trainers))

    def assert_serves(self, step, engines=None):
        for rank in self.engines if engines is None else engines:
            version = rank.client.wait_served(step, fleet.PATIENCE)
            self.assertEqual((version.step, rank.client.served_version), (step, version))
            self.assertEqual(rank.differing(step), 0, rank.client.seat)


class Committed(RefitTest):
    REPLICAS = 2

    def test_every_element_of_every_engine_is_that_of_the_published_step(self):
        replicas = replica_names(self.fleet)
        for step in (3, 4, 9):
            self.publish(step)
            report = self.refit.sync(step, timeout=fleet.PATIENCE)
            self.assertEqual((report.outcome, report.step, report.reason), ("Committed", step, None))
            self.assertEqual(report.bytes_received, len(replicas) * REPLICA_BYTES)
            self.assertEqual((report.bytes_sent, report.bytes_skipped), (report.bytes_received, 0))
            self.assertEqual([replica.replica for replica in report.replicas], replicas)
            self.assertEqual(report.left_out, ())
            self.assertIn("pause", report.phase_milliseconds)
            self.assertEqual(self.released(), [Outcome.READ] * TRAINING_RANKS)
            self.assert_serves(step)
        for rank in self.engines:
            # A rank that has just started serves nothing, so there is nothing to pause.
            self.assertEqual(rank.calls, ["apply", "commit", "resume", *["pause", "apply", "commit", "resume"] * 2])

    def test_a_driver_may_ask_before_the_step_and_from_an_event_loop(self):
        async def step(number):
            asked = asyncio.create_task(self.refit(number, wait="quorum:2", timeout=fleet.PATIENCE))
            await asyncio.sleep(0)
            self.publish(number)
            outcomes = await asyncio.gather(*(rank.client.released(fleet.PATIENCE) for rank in self.trainers))
            return await asked, outcomes

        report, outcomes = asyncio.run(step(1))
        self.assertEqual((report.outcome, report.step, set(outcomes)), ("Committed", 1, {Outcome.READ}))
        self.assert_serves(1)
        status = asyncio.run(self.refit.status())
        self.assertEqual((status.leader, status.last_round), ("training/0", report))
        (rank,) = status.ranks
        self.assertEqual((rank.seat, rank.registered), ("training/0", True))

    def test_one_event_loop_may_run_callbacks_that_are_coroutines(self):
        rank = self.engines[0]

        async def resume(version):
            await asyncio.sleep(0)
            rank.calls.append("resumed")

        rank.resume = resume

        async def step():
            rank.client._loop = asyncio.get_running_loop()
            self.publish(1)
            return await self.refit(1, timeout=fleet.PATIENCE)

        self.assertEqual(asyncio.run(step()).outcome, "Committed")
        self.assertEqual(rank.calls, ["apply", "commit", "resumed"])


class Told(RefitTest):
    def setUp(self):
        refit, *others = yaml.safe_load_all((fleet.ROOT / "tests/local/tiny.yaml").read_text())
        refit["spec"]["commit"] = {"inFlight": "Drain", "kvCache": "Keep"}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump_all([refit, *others], file)
            file.flush()
            self.FILES = (file.name,)
            super().setUp()

    def test_engines_are_told_what_the_resource_says_of_requests_and_caches(self):
        for step in (1, 2):
            self.publish(step)
            self.refit.sync(step, timeout=fleet.PATIENCE)
            self.released()
            self.assert_serves(step)
        for rank in self.engines:
            self.assertEqual(rank.told, [KvCache.KEEP, InFlight.DRAIN, KvCache.KEEP])


class Restarts(RefitTest):
    def commit(self, step):
        self.publish(step)
        self.assertEqual(self.refit.sync(step, timeout=fleet.PATIENCE).outcome, "Committed")
        self.released()
        self.assert_serves(step)

    def test_clients_register_again_with_an_agent_that_was_killed(self):
        self.commit(1)
        seats = ["training/0", "training/1", f"inference/default/{replica_names(self.fleet)[0]}/0"]
        for step, seat in enumerate(seats, 2):
            with self.subTest(seat):
                self.fleet.restart(self.fleet.pod_of(seat))
                ranks = self.trainers + self.engines
                fleet.wait_for("registration", lambda: all(rank.client._session.registered for rank in ranks))
                self.commit(step)

    def test_a_step_that_was_published_to_an_agent_that_dies_is_published_to_its_successor(self):
        for rank in self.trainers[1:]:
            rank.publish(5)
        self.fleet.restart(self.fleet.pod_of("training/1"))
        self.trainers[0].publish(5)
        self.assertEqual(self.refit.sync(5, timeout=fleet.PATIENCE).outcome, "Committed")
        self.assertEqual(self.released(), [Outcome.READ] * TRAINING_RANKS)
        self.assert_serves(5)

    def test_a_question_to_an_agent_that_dies_is_asked_of_its_successor(self):
        async def ask():
            asked = asyncio.create_task(self.refit(1, timeout=fleet.PATIENCE))
            await asyncio.sleep(0)
            await asyncio.to_thread(self.fleet.restart, self.fleet.pod_of("training/0"))
            await asyncio.to_thread(self.publish, 1)
            return await asked

        self.assertEqual(asyncio.run(ask()).step, 1)

    def test_an_engine_of_an_agent_that_dies_serves_on(self):
        self.commit(1)
        pod = self.fleet.pod_of(f"inference/default/{replica_names(self.fleet)[0]}/0")
        self.fleet.kill(pod)
        fleet.wait_for("end of the connection", lambda: self.engines[0].client._session._connection is None)
        self.assertEqual([rank.client.state for rank in self.engines], [EngineState.SERVING] * REPLICA_RANKS)
        self.assertEqual([rank.differing(1) for rank in self.engines], [0] * REPLICA_RANKS)

    def test_without_its_agent_a_trainer_gets_its_memory_back(self):
        rank = self.trainers[0]
        rank.client._session._absence = 0.2
        rank.publish(1)
        self.fleet.kill(self.fleet.pod_of("training/0"))
        with self.assertRaises(weightrefit.AgentUnreachable) as raised:
            rank.wait_released()
        self.assertEqual((raised.exception.code, raised.exception.rank), ("PeerLost", "training/0"))
        rank.publish(2)


class WrongEngines(RefitTest):
    def test_what_a_callback_raises_is_told_and_the_next_step_heals_it(self):
        for step, callback in ((2, "apply"), (4, "commit")):
            with self.subTest(callback):
                self.publish(step - 1)
                self.refit.sync(step - 1, timeout=fleet.PATIENCE)
                self.released()
                self.engines[1].wrong[callback] = RuntimeError("no room")
                self.publish(step)
                with self.assertRaises(weightrefit.RefitFailed) as raised, self.assertLogs("weightrefit"):
                    self.refit.sync(step, timeout=fleet.PATIENCE)
                self.assertEqual(raised.exception.report.step, step)
                self.assertIn("no room", self.fleet.log(self.fleet.pod_of(self.engines[1].client.seat)))
                self.assertIs(self.engines[1].client.state, EngineState.DIRTY)
                self.assertIsNone(self.engines[0].client.served_version, "no rank serves what another lacks")
                self.released()
        self.publish(5)
        self.refit.sync(5, timeout=fleet.PATIENCE)
        self.assert_serves(5)

    def test_an_engine_that_cannot_pause_serves_on(self):
        self.publish(1)
        self.refit.sync(1, timeout=fleet.PATIENCE)
        self.released()
        self.engines[0].wrong["pause"] = RuntimeError("busy")
        self.publish(2)
        with self.assertRaises(weightrefit.RefitFailed), self.assertLogs("weightrefit"):
            self.refit.sync(2, timeout=fleet.PATIENCE)
        self.assert_serves(1)


class WrongCalls(RefitTest):
    def test_memory_that_is_lent_cannot_hold_another_step(self):
        trainer = self.trainers[0]
        with self.assertRaises(weightrefit.Misuse):
            trainer.client.wait_released()
        trainer.publish(1)
        with self.assertRaises(weightrefit.Misuse) as raised:
            trainer.client.publish(2)
        self.assertEqual(raised.exception.code, "SourceChanged")
        with self.assertRaises(weightrefit.DeadlineExceeded):
            trainer.client.wait_released(0.01)
        self.assertIsInstance(raised.exception, weightrefit.WeightrefitError)

    def test_ranks_that_publish_different_steps_get_their_memory_back(self):
        for rank, step in zip(self.trainers, (1, 1, 2)):
            rank.publish(step)
        outcomes = set()
        for rank in self.trainers:
            try:
                outcomes.add(rank.wait_released().value)
            except weightrefit.PublishRefused as error:
                outcomes.add(error.code)
        self.assertTrue(outcomes <= {"Dropped", "Withdrawn", "PublishSkew"}, outcomes)

    def test_only_the_leaders_agent_is_asked(self):
        with weightrefit.Refit(socket=self.fleet.socket_of("training/1")) as other:
            with self.assertRaisesRegex(weightrefit.Refused, "training/0"):
                other.sync(1, timeout=fleet.PATIENCE)
        for wait in ("most", "quorum:0", "quorum:x"):
            with self.assertRaises(weightrefit.Misuse):
                self.refit.sync(1, wait=wait)

    def test_more_replicas_than_there_are_cannot_serve(self):
        self.publish(1)
        with self.assertRaises(weightrefit.RefitFailed) as raised:
            self.refit.sync(1, wait="quorum:2", timeout=fleet.PATIENCE)
        self.assertEqual((raised.exception.code, raised.exception.report.outcome), ("NotEnoughReady", "Committed"))

    def test_a_step_that_nobody_publishes_ends_the_wait(self):
        with self.assertRaises(weightrefit.DeadlineExceeded) as raised:
            self.refit.sync(7, timeout=0.1)
        self.assertEqual((raised.exception.code, raised.exception.message), ("CommitTimeout", "step 7 has not ended in time"))
        with self.assertRaisesRegex(TimeoutError, "step 8 has not ended in time"):
            asyncio.run(self.refit(8, timeout=0.1))

    def test_who_waits_hears_of_the_end_of_its_client(self):
        async def closed():
            asked = asyncio.create_task(self.refit(1, timeout=fleet.PATIENCE))
            await asyncio.sleep(0)
            await asyncio.to_thread(self.refit.close)
            await asked

        with self.assertRaises(weightrefit.Closed):
            asyncio.run(closed())
        with self.assertRaises(weightrefit.Closed):
            self.refit.sync(1)


class Refusals(fleet.FleetTest):
    def test_what_differs_from_the_layout_is_named(self):
        others = [TrainerRank(self.fleet, rank) for rank in (0, 1)]
        others += [EngineRank(self.fleet, replica_names(self.fleet)[0], rank) for rank in range(REPLICA_RANKS)]
        wrong = TrainerRank(self.fleet, 2)
        for rank in [*others, wrong]:
            self.addCleanup(rank.client.close)
        tensors = [placed.tensor for placed in wrong.placed]
        wrong.placed = weightrefit.place(weightrefit.Tensor(t.name, "bf16", t.shape) for t in tensors[1:])
        with self.assertRaises(weightrefit.Refused) as raised, self.assertLogs("weightrefit"):
            together(wrong.register, *(rank.register for rank in others))
        error = raised.exception
        self.assertEqual((error.code, error.rank), ("RegistrationMismatch", "training/2"))
        self.assertIn("`embed.weight` is missing", str(error))
        self.assertIn("hint: ", str(error))
        # The same program can correct itself.
        wrong.placed = weightrefit.place(tensors)
        wrong.register()

    def test_a_rank_has_one_owner(self):
        ranks = [TrainerRank(self.fleet, rank) for rank in range(TRAINING_RANKS)]
        ranks += [EngineRank(self.fleet, replica_names(self.fleet)[0], rank) for rank in range(REPLICA_RANKS)]
        second = TrainerRank(self.fleet, 0)
        for rank in [*ranks, second]:
            self.addCleanup(rank.client.close)
        together(*(rank.register for rank in ranks))
        with self.assertRaises(weightrefit.Refused) as raised, self.assertLogs("weightrefit"):
            second.register()
        self.assertEqual(raised.exception.code, "DuplicateRank")

    def test_an_agent_hosts_the_ranks_of_its_pod_alone(self):
        stray = TrainerRank(self.fleet, 0)
        stray.client = weightrefit.Trainer(1, "w1", socket=self.fleet.socket_of("training/0"))
        with self.assertRaisesRegex(weightrefit.Refused, "this agent hosts training/0"), self.assertLogs("weightrefit"):
            stray.register()


class Incomplete(fleet.FleetTest):
    WITHOUT = ("training/2",)

    def test_without_the_other_ranks_agents_there_is_no_membership(self):
        lonely = TrainerRank(self.fleet, 0)
        with self.assertRaisesRegex(weightrefit.DeadlineExceeded, "waits for a membership") as raised:
            lonely.client.register(lonely.placed, timeout=0.3)
        self.assertEqual((raised.exception.code, raised.exception.rank), ("NotConfigured", "training/0"))
        with weightrefit.Refit(socket=self.fleet.socket_of("training/0")) as refit:
            status = refit.status_sync()
        self.assertEqual((status.epoch, [rank.seat for rank in status.ranks]), (None, ["training/0"]))


if __name__ == "__main__":
    unittest.main()
