"""How engine ranks take a version: in groups, in their order, with what the trainer gave beside it."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
import numpy as np  # noqa: E402
from fleet import together  # noqa: E402
from tiny import REPLICA_RANKS, TRAINING_RANKS, EngineRank, TrainerRank, replica_names  # noqa: E402

import weightrefit  # noqa: E402
from weightrefit import EngineState, Group, GroupClass  # noqa: E402

GROUPS = (
    Group("embed", GroupClass.DERIVED, ("embed.weight",)),
    Group("layers.0", GroupClass.APPLY, ("layers.0.qkv.weight", "layers.0.o.weight")),
    Group("norm", GroupClass.DIRECT, ("norm.weight",)),
)


class GroupedRank(EngineRank):
    """Takes its tensors group by group; `stops` before the group of that name."""

    def __init__(self, of, replica, rank, groups=GROUPS):
        self.extras, self.groups, self.stops = [], [], None
        super().__init__(of, replica, rank, groups=groups)

    def apply(self, staging):
        self._called("apply")
        for group in staging.groups():
            if group.name == self.stops:
                break
            self._called(group.name)
            self.groups.append((group.name, group.kind, tuple(group)))
            for name, content in group.items():
                self.live[name][...] = np.frombuffer(content, np.uint16).reshape(self.live[name].shape)

    def commit(self, version, kv_cache, extras):
        self.extras.append(extras)
        return super().commit(version, kv_cache, extras)


class Commit(fleet.FleetTest):
    def setUp(self):
        super().setUp()
        of = self.fleet
        self.trainers = [TrainerRank(of, rank) for rank in range(TRAINING_RANKS)]
        self.engines = [GroupedRank(of, replica_names(of)[0], rank) for rank in range(REPLICA_RANKS)]
        self.refit = weightrefit.Refit(socket=of.socket_of("training/0"))
        for client in [self.refit, *(rank.client for rank in self.trainers + self.engines)]:
            self.addCleanup(client.close)
        together(*(rank.register for rank in self.trainers + self.engines))

    def refitted(self, step, extras=None):
        for rank in self.trainers[1:]:
            rank.publish(step)
        self.trainers[0].publish(step, extras)
        try:
            self.refit.sync(step, timeout=fleet.PATIENCE)
        finally:
            together(*(rank.wait_released for rank in self.trainers))
        for rank in self.engines:
            rank.client.wait_served(step, fleet.PATIENCE)
            self.assertEqual(rank.differing(step), 0)

    def test_groups_are_applied_in_their_order_and_extras_reach_every_commit(self):
        scales = {"kv_scales": {"layers.0.k": 0.5, "layers.0.ü": [1, None]}}
        for step, extras in ((1, scales), (2, None), (3, [])):
            self.refitted(step, extras)
        for rank in self.engines:
            self.assertEqual(rank.groups, 3 * list(GROUPS))
            self.assertEqual(rank.extras, [scales, None, []])

    def test_a_group_that_fails_or_is_left_out_is_named_and_the_next_version_heals_it(self):
        rank = self.engines[1]
        self.refitted(1)
        for step, wrong in ((2, "raises"), (4, "stops")):
            with self.subTest(wrong):
                if wrong == "raises":
                    rank.wrong["layers.0"] = RuntimeError("no room")
                else:
                    rank.stops = "layers.0"
                with self.assertRaises(weightrefit.RefitFailed), self.assertLogs("weightrefit"):
                    self.refitted(step)
                self.assertIs(rank.client.state, EngineState.DIRTY)
                rank.stops = None
                why = "no room" if wrong == "raises" else "it was not applied"
                self.assertIn(f"group `layers.0`: {why}", self.fleet.log(self.fleet.pod_of(rank.client.seat)))
                self.refitted(step + 1)

    def test_what_is_no_extras_is_refused_where_it_is_given(self):
        for rank, extras in ((1, {}), (0, float("nan")), (0, object()), (0, "x" * (64 << 10))):
            with self.assertRaises(weightrefit.Misuse):
                self.trainers[rank].client.publish(1, extras)
        self.refitted(1, "x" * ((64 << 10) - 2))

    def test_groups_have_every_tensor_once(self):
        of, replica = self.fleet, replica_names(self.fleet)[0]
        for groups in (GROUPS[:2], (*GROUPS, Group("again", GroupClass.DIRECT, ("norm.weight",)))):
            with self.assertRaises(weightrefit.Misuse):
                GroupedRank(of, replica, 0, groups)


if __name__ == "__main__":
    unittest.main()
