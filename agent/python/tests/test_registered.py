"""Pools without a layout: what their engines record is what is planned."""

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
from weightrefit.recording import Piece  # noqa: E402


def recorded(rank):
    """What a loader would have copied to a rank of tests/local/tiny.yaml."""

    def piece(name, rows, columns=((0, 0, 256),)):
        return Piece(f"{name}.weight", None, (rows, columns))

    half = 128 * rank
    fused = [piece(f"layers.0.{name}", ((128 * slot, half, 128),)) for slot, name in enumerate("qkv")]
    return {
        "embed.weight": (piece("embed", ((0, 1024 * rank, 976 if rank else 1024),)),),
        "layers.0.o.weight": (piece("layers.0.o", ((0, 0, 256),), ((0, half, 128),)),),
        "layers.0.qkv.weight": tuple(fused),
        "norm.weight": (Piece("norm.weight", None, (((0, 0, 256),),)),),
    }


def without_layout():
    refit, *others = yaml.safe_load_all((fleet.ROOT / "tests/local/tiny.yaml").read_text())
    refit["spec"]["inference"]["pools"][0] |= {"layout": {"type": "Registered"}, "minReplicas": 1}
    file = tempfile.NamedTemporaryFile("w", suffix=".yaml")
    yaml.safe_dump_all([refit, *others], file)
    file.flush()
    return file


class Registered(fleet.FleetTest):
    REPLICAS = 2

    def setUp(self):
        file = without_layout()
        self.addCleanup(file.close)
        self.FILES = (file.name,)
        super().setUp()
        self.trainers = [TrainerRank(self.fleet, rank) for rank in range(TRAINING_RANKS)]
        self.refit = weightrefit.Refit(socket=self.fleet.socket_of("training/0"))
        for client in [self.refit, *(rank.client for rank in self.trainers)]:
            self.addCleanup(client.close)

    def engines(self, replica, pieces=recorded):
        engines = [EngineRank(self.fleet, replica, rank, pieces(rank)) for rank in range(REPLICA_RANKS)]
        for engine in engines:
            self.addCleanup(engine.client.close)
        return engines

    def refitted(self, step, *engines):
        together(*(lambda rank=rank: rank.publish(step) for rank in self.trainers))
        report = self.refit.sync(step, wait="quorum:1", timeout=fleet.PATIENCE)
        self.assertEqual(report.outcome, "Committed")
        together(*(rank.wait_released for rank in self.trainers))
        for engine in engines:
            engine.client.wait_served(step, fleet.PATIENCE)
            self.assertEqual(engine.differing(step), 0)

    def register(self, *ranks):
        together(*(rank.register for rank in ranks))

    def test_engines_get_what_they_recorded_nobody_is_a_member_before_and_one_that_differs_is_refused(self):
        def swapped(rank):
            pieces = recorded(rank)
            q, k, v = pieces["layers.0.qkv.weight"]
            pieces["layers.0.qkv.weight"] = (Piece(k.tensor, None, q.runs), Piece(q.tensor, None, k.runs), v)
            return pieces

        with self.assertRaises(weightrefit.DeadlineExceeded):
            self.trainers[0].client.register(self.trainers[0].placed, timeout=0.5)
        first, second = replica_names(self.fleet)
        engines, wrong = self.engines(first), self.engines(second, swapped)
        self.register(*self.trainers, *engines)
        for engine in wrong:
            with self.assertRaises(weightrefit.Refused) as raised:
                engine.register()
            self.assertEqual(raised.exception.code, "RegistrationMismatch")
            self.assertIn("`layers.0.qkv.weight` holds `layers.0.k.weight` as [[(0, ", raised.exception.message)
        self.refitted(1, *engines)
        # One that comes later has the layout that there is.
        late = self.engines(second)
        self.register(*late)
        self.refitted(2, *engines, *late)

    def test_a_recording_that_does_not_fit_the_model_is_refused_where_it_is_planned(self):
        def unknown(rank):
            return recorded(rank) | {"norm.weight": (Piece("norms.weight", None, (((0, 0, 256),),)),)}

        name = replica_names(self.fleet)[0]
        wrong = self.engines(name, unknown)
        for engine in wrong:
            with self.assertRaises(weightrefit.DeadlineExceeded):
                engine.client.register(timeout=1)
        pod = self.fleet.pod_of(f"inference/default/{name}/0")
        fleet.wait_for("refusal", lambda: "holds `norms.weight`, which is no tensor of the model" in self.fleet.log(pod))

    def test_recordings_outlive_coordinator_and_agents(self):
        first, second = (self.engines(name) for name in replica_names(self.fleet))
        self.register(*self.trainers, *first, *second)
        self.refitted(1, *first, *second)
        self.fleet.kill("coordinator")
        address = self.fleet.agents[self.fleet.pod_of("training/0")][1]
        self.fleet.coordinate(address)
        # A new agent is a new member, and its engines tell it again what they hold.
        name = replica_names(self.fleet)[0]
        pod = self.fleet.pod_of(f"inference/default/{name}/0")
        events = self.refit.events()
        self.fleet.restart(pod)
        while events.next(fleet.PATIENCE) != weightrefit.ReplicaFound("default", name):
            pass
        with weightrefit.Refit(socket=self.fleet.socket(pod)) as restarted:
            fleet.wait_for("engines", lambda: all(rank.registered for rank in restarted.status_sync().ranks))
        self.refitted(2, *first, *second)


if __name__ == "__main__":
    unittest.main()
