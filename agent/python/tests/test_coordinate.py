"""`weightrefit coordinate`: who may take part, and what its restart leaves standing."""

import contextlib
import pathlib
import shutil
import stat
import subprocess
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
from fleet import together  # noqa: E402
from tiny import REPLICA_RANKS, TRAINING_RANKS, EngineRank, TrainerRank, replica_names  # noqa: E402

import weightrefit  # noqa: E402


class WhoMayTakePart(fleet.FleetTest):
    WITHOUT = ("training/0", "training/1")

    def token(self, seat):
        arguments = self.fleet.agents[self.fleet.pod_of(seat)]
        return arguments[arguments.index("--token") + 1]

    def test_tokens_are_readable_by_their_owner_alone(self):
        directory = self.fleet.directory / "tokens"
        self.assertEqual(stat.S_IMODE(directory.stat().st_mode), 0o700)
        modes = {}
        for file in directory.iterdir():
            # A token that is being replaced lies in a file without a name yet, and is gone in a moment.
            with contextlib.suppress(FileNotFoundError):
                modes[file.name] = stat.S_IMODE(file.stat().st_mode)
        names = {name for name in modes if not name.startswith(".tmp")}
        self.assertEqual(names, {"authority.pem", *(f"{pod}.token" for pod in self.fleet.agents)})
        self.assertEqual(set(modes.values()), {0o600})

    def test_a_token_is_taken_once_and_the_next_is_there(self):
        seat, pod = "training/0", self.fleet.pod_of("training/0")
        old = self.token(seat)
        kept = shutil.copy(old, self.fleet.directory / "kept")
        with open(kept) as file:
            first = file.read()
        self.fleet.start(pod)
        fleet.wait_for("new token", lambda: pathlib.Path(old).read_text() != first)
        self.fleet.kill(pod)
        self.fleet.start(pod, **{old: str(kept)})
        fleet.wait_for("refusal", lambda: "token is not the unused one" in self.fleet.log(pod))
        second = pathlib.Path(old).read_text()
        self.fleet.restart(pod)
        fleet.wait_for("another token", lambda: pathlib.Path(old).read_text() != second)

    def test_a_pod_takes_part_as_its_own_ranks_alone(self):
        pod = self.fleet.pod_of("training/0")
        self.fleet.start(pod, **{"training/0": "training/1"})
        refusal = f"pod {pod} may hold training/0"
        fleet.wait_for("refusal", lambda: refusal in self.fleet.log(pod))

    def test_the_token_of_a_pod_is_not_that_of_another(self):
        pod = self.fleet.pod_of("training/0")
        self.fleet.start(pod, **{self.token("training/0"): self.token("training/1")})
        fleet.wait_for("refusal", lambda: "token is not the unused one" in self.fleet.log(pod))


class Restart(fleet.FleetTest):
    def test_rounds_go_on_without_it_and_its_successor_takes_the_agents_over(self):
        trainers = [TrainerRank(self.fleet, rank) for rank in range(TRAINING_RANKS)]
        engines = [EngineRank(self.fleet, replica_names(self.fleet)[0], rank) for rank in range(REPLICA_RANKS)]
        refit = weightrefit.Refit(socket=self.fleet.socket_of("training/0"))
        for client in [refit, *(rank.client for rank in trainers + engines)]:
            self.addCleanup(client.close)
        together(*(rank.register for rank in trainers + engines))

        def commit(step):
            for rank in trainers:
                rank.publish(step)
            self.assertEqual(refit.sync(step, timeout=fleet.PATIENCE).outcome, "Committed")
            together(*(rank.wait_released for rank in trainers))
            self.assertEqual([rank.differing(step) for rank in engines], [0] * REPLICA_RANKS)

        commit(1)
        self.fleet.kill("coordinator")
        commit(2)
        before = self.fleet.started
        self.fleet.coordinate(before["agents"][0]["arguments"][1])
        self.assertEqual(self.fleet.started, before, "agents need no new command line")
        # Only the new coordinator can let a new agent in.
        self.fleet.restart(self.fleet.pod_of("training/1"))
        fleet.wait_for("registration", lambda: trainers[1].client._session.registered)
        commit(3)


class Refusals(unittest.TestCase):
    def test_what_cannot_be_served_is_refused(self):
        command = [fleet.binary("weightrefit"), "coordinate", "-f", str(fleet.ROOT / "tests/local/tiny.yaml")]
        rows = [
            (["--listen", "0.0.0.0:0", "--directory", "/"], 2, "agents cannot dial 0.0.0.0"),
            (["--listen", "127.0.0.1:0", "--directory", "/"], 1, "which lets others read tokens"),
            (["--listen", "127.0.0.1:0", "--directory", "/dev/null"], 1, "cannot write to directory /dev/null"),
        ]
        for arguments, code, message in rows:
            done = subprocess.run(command + arguments, capture_output=True, text=True)
            self.assertEqual((done.returncode, done.stdout), (code, ""))
            self.assertIn(message, done.stderr)
            self.assertIn("hint: ", done.stderr)


if __name__ == "__main__":
    unittest.main()
