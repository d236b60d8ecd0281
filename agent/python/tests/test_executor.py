"""The executor in the rank's own process, on the double of GPUs: rounds by NCCL without a GPU in any agent."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
from fleet import together  # noqa: E402
from listener import Listener, read_frame, send_frame  # noqa: E402
from tiny import REPLICA_RANKS, TRAINING_RANKS, replica_names  # noqa: E402

import weightrefit  # noqa: E402
from weightrefit import executor, wire  # noqa: E402

def blocks(kind):
    """The lines of a block of the page."""
    page = (fleet.ROOT / "docs/agent-socket.md").read_text()
    return page.split(f"```{kind}\n")[1].split("```")[0].strip().splitlines()


class Process:
    """A rank in a process of its own, driven by lines."""

    def __init__(self, of, name, **environment):
        command = [sys.executable, str(pathlib.Path(__file__).with_name("executor_rank.py")), name, of.socket_of(name)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.name = name
        self.process = subprocess.Popen(command, env=os.environ | environment, **pipes)

    def ask(self, *words):
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self):
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(f"{self.name} ended with {self.process.wait()}")
        return json.loads(line)

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class ExecutorTest(fleet.FleetTest):
    """All ranks in processes of their own, with executors."""

    # By seat, beside those of all.
    ENVIRONMENT = {}

    def setUp(self):
        super().setUp()
        of = self.fleet
        self.replicas = replica_names(of)
        self.training = [f"training/{rank}" for rank in range(TRAINING_RANKS)]
        self.inference = [f"inference/default/{name}/{rank}" for name in self.replicas for rank in range(REPLICA_RANKS)]
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.tally = pathlib.Path(folder.name)
        self.ranks = {}
        seats = self.training + self.inference
        together(*(lambda seat=seat: self.start(seat, **self.ENVIRONMENT.get(seat, {})) for seat in seats))
        self.refit = weightrefit.Refit(socket=of.socket_of("training/0"))
        self.addCleanup(self.refit.close)

    def start(self, seat, **environment):
        rank = Process(self.fleet, seat, FAKEGPU_TALLY=str(self.tally), **environment)
        self.ranks[seat] = rank
        self.addCleanup(rank.kill)
        self.assertEqual(rank.answer(), "registered", seat)

    def publish(self, step):
        for seat in self.training:
            self.ranks[seat].ask("publish", step)

    def ended(self, step):
        try:
            return self.refit.sync(step, timeout=fleet.PATIENCE)
        except weightrefit.RefitFailed as error:
            return error.report

    def refit_to(self, step):
        self.publish(step)
        report = self.ended(step)
        released = together(*(lambda seat=seat: self.ranks[seat].ask("released") for seat in self.training))
        return report, released

    def groups(self):
        """What NCCL was asked to move so far; the last line may not be whole."""
        lines = [line for file in self.tally.iterdir() for line in file.read_text().split("\n")[:-1]]
        return [group for group in map(json.loads, lines) if "communicator" in group]

    def sent(self):
        """Bytes that went by NCCL so far."""
        return sum(size for group in self.groups() for _, size in group["sends"])

    def assert_serves(self, step):
        differing = together(*(lambda seat=seat: self.ranks[seat].ask("differing", step) for seat in self.inference))
        self.assertEqual(differing, [0] * len(self.inference))


    def assert_commits(self, step):
        report, _ = self.refit_to(step)
        self.assertEqual((report.outcome, report.reason), ("Committed", None))
        self.assert_serves(step)
        return report

    def wait_for_log(self, seat, text):
        fleet.wait_for(f"`{text}` in a log", lambda: text in self.fleet.log(self.fleet.pod_of(seat)))


class Rounds(ExecutorTest):
    def test_rounds_go_by_nccl_with_no_gpu_in_any_agent(self):
        for step in (1, 2):
            report = self.assert_commits(step)
            self.assertEqual(self.sent(), step * report.bytes_received)

    def test_an_agent_that_restarts_finds_executors_again(self):
        before = self.assert_commits(1).bytes_received
        self.fleet.restart(self.fleet.pod_of("training/1"))
        self.assert_commits(2)
        self.assertEqual(self.ranks["training/1"].ask("error"), None)
        self.assertGreaterEqual(self.sent(), 2 * before)

    def test_an_executor_that_stops_leaves_tcp(self):
        before = self.assert_commits(1).bytes_received
        self.ranks["training/1"].ask("stop")
        self.wait_for_log(self.inference[0], "bytes go by TCP")
        self.assert_commits(2)
        self.assertEqual(self.sent(), before)


class Slow(ExecutorTest):
    """Bytes take seconds, so that things happen in the middle of them."""

    REPLICAS = 2
    ENVIRONMENT = {f"training/{rank}": {"FAKEGPU_LINK_BYTES": "300000"} for rank in range(TRAINING_RANKS)}

    def begin(self, step):
        self.publish(step)
        lanes = len(self.replicas)
        fleet.wait_for("bytes of all replicas", lambda: len({group["communicator"] for group in self.groups()}) == lanes)

    def end(self, step):
        report = self.ended(step)
        for seat in self.training:
            self.ranks[seat].ask("released")
        return report

    def test_a_process_that_dies_takes_its_replica_alone_and_its_successor_brings_it_back(self):
        self.begin(1)
        lost = self.inference[-1]
        self.ranks[lost].kill()
        report = self.end(1)
        self.assertEqual(report.outcome, "Committed")
        self.assertEqual([replica.replica for replica in report.left_out], self.replicas[1:])
        self.start(lost)
        self.assert_commits(2)

    def test_an_executor_that_stops_in_the_middle_ends_its_replicas_part_alone(self):
        self.begin(1)
        self.assertEqual(self.ranks[self.inference[-1]].ask("stop"), "stopped")
        report = self.end(1)
        self.assertEqual([replica.replica for replica in report.left_out], self.replicas[1:])
        self.assert_commits(2)


class Hanging(ExecutorTest):
    """The third send of the first training rank never happens."""

    ENVIRONMENT = {"training/0": {"FAKEGPU_HANG": "0@3"}}

    def test_a_round_that_is_given_up_is_aborted_everywhere_and_the_next_one_has_a_new_attempt(self):
        report, _ = self.refit_to(1)
        self.assertEqual(report.outcome, "Aborted")
        # Of the ranks, one is late, and the others lose it.
        self.assertIn(report.reason, ("TransferTimeout", "PeerLost"))
        self.assert_commits(2)
        self.assertGreater(self.sent(), 0)
        self.assertIn("attempt=2", self.fleet.log(self.fleet.pod_of("training/0")))


class Wedged(ExecutorTest):
    """As `Hanging`, and no abort of that rank ever ends."""

    ENVIRONMENT = {"training/0": {"FAKEGPU_HANG": "0@3", "FAKEGPU_WEDGE": "0"}}

    def test_its_owner_is_told_and_every_other_process_goes_on(self):
        report, _ = self.refit_to(1)
        self.assertEqual(report.outcome, "Aborted")
        fleet.wait_for("wedge", lambda: self.ranks["training/0"].ask("error") == "AgentWedged")
        self.assertEqual(self.ranks["training/0"].ask("publish", 2), "AgentWedged")
        self.wait_for_log("training/0", "AgentWedged")
        self.assertEqual([self.ranks[seat].ask("error") for seat in self.training[1:] + self.inference], [None] * 4)
        self.ranks["training/0"].kill()
        self.start("training/0")
        self.assert_commits(3)


class OfAnotherNccl(ExecutorTest):
    ENVIRONMENT = {"training/2": {"FAKEGPU_NCCL_VERSION": "22909"}}

    def test_versions_that_differ_leave_tcp_and_are_named(self):
        self.assert_commits(1)
        self.assertEqual(self.sent(), 0)
        self.wait_for_log("training/0", "members of the lane have NCCL 2.32.3 and 2.29.9")


class Refused(fleet.FleetTest):
    """What an agent does not take."""

    def refusal(self, **changes):
        device = {"gpu": "GPU-1", "nccl": 23203, "sharesGpu": False, "windowBytes": 1}
        role = {"kind": "executor", "seat": "training/0", "tables": 1, "device": device} | changes
        connection = wire.Connection(self.fleet.socket_of("training/0"))
        self.addCleanup(connection.close)
        connection.send({"type": "hello", "protocol": 1, "instance": os.urandom(16).hex(), "role": role})
        self.assertEqual(connection.receive()[0]["type"], "welcome")
        answer, _ = connection.receive()
        return connection, (answer.get("code"), answer.get("message"))

    def test_strangers_others_of_a_rank_and_other_forms_are_told_why(self):
        first, answer = self.refusal()
        self.assertEqual(answer, (None, None), "registered")
        text = "training/0 has an executor of another process, which is connected"
        self.assertEqual(self.refusal()[1], ("DuplicateRank", text))
        first.end()
        fleet.wait_for("end of the first", lambda: self.refusal()[1] == (None, None))
        self.assertEqual(self.refusal(seat="training/1")[1], ("Unsupported", "this agent hosts training/0, not training/1"))
        text = "the executor reads tables of form 2, this agent writes form 1"
        self.assertEqual(self.refusal(tables=2)[1], ("VersionSkew", text))

    def test_an_executor_says_nothing_else(self):
        connection, _ = self.refusal()
        connection.send({"type": "said", "said": {"kind": "ran", "lane": 7, "run": 7, "bytes": 7}})
        connection.send({"type": "publish", "step": 1, "world": "w"})
        answer, _ = connection.receive()
        self.assertEqual((answer["code"], answer["message"]), ("Unsupported", "an executor may not send `publish`"))


class Starting(unittest.TestCase):
    """An executor and a listener in an agent's place."""

    def setUp(self):
        self.listener = Listener(self)
        self.double = fleet.binary("libweightrefit_fakegpu.so")

    def started(self, **changes):
        options = {"device": 0, "timeout": 0.0, "library": fleet.binary("libweightrefit.so"), "window_bytes": 1 << 20}
        options |= {"cuda_library": self.double, "nccl_library": self.double}
        return executor.Executor(self.listener.path, "training/0", **options | changes)

    def refused(self, **changes):
        with self.assertRaises(weightrefit.ExecutorFailed) as error:
            self.started(**changes)
        return error.exception.code, error.exception.message

    def test_what_is_missing_has_a_name(self):
        rows = [
            ({"library": "/nowhere/libweightrefit.so"}, "TransportUnavailable", "no executor at /nowhere"),
            ({"library": self.double}, "TransportUnavailable", "undefined symbol: weightrefit_interface"),
            ({"cuda_library": "/nowhere/libcuda.so.1"}, "GpuNotVisible", "cannot open /nowhere/libcuda.so.1"),
            ({"nccl_library": "/nowhere/libnccl.so.2"}, "TransportUnavailable", "cannot open /nowhere/libnccl.so.2"),
            ({"device": 99}, "GpuNotVisible", "device 99 is not among the 8 visible GPUs"),
        ]
        for changes, code, text in rows:
            with self.subTest(text):
                told = self.refused(**changes)
                self.assertEqual(told[0], code)
                self.assertIn(text, told[1])

    def test_no_agent_and_an_agent_that_refuses_have_a_name(self):
        self.assertEqual(self.refused(timeout=0.1), ("PeerLost", "the agent did not answer in time"))
        self.listener.accept().close()
        for code in ("VersionSkew", "Unsupported"):
            answered = threading.Thread(target=self.answer, args=(f'"code":"{code}","message":"no","hint":"yes","request":null',))
            answered.start()
            self.assertEqual(self.refused(timeout=fleet.PATIENCE), (code, "no (yes)"))
            answered.join()

    def answer(self, error):
        peer = self.listener.accept()
        self.addCleanup(peer.close)
        read_frame(peer)
        send_frame(peer, '{"type":"error",%s}' % error)

    def test_its_frames_are_those_of_the_page(self):
        lines = [line.split(" ", 1)[1] for line in blocks("executor")]
        started = []
        starting = threading.Thread(target=lambda: started.append(self.started(timeout=fleet.PATIENCE)))
        starting.start()
        peer = self.listener.accept()
        self.addCleanup(peer.close)
        hello, want = json.loads(read_frame(peer)), json.loads(lines[0])
        want["instance"], want["role"]["device"]["gpu"] = hello["instance"], hello["role"]["device"]["gpu"]
        self.assertEqual(hello, want)
        send_frame(peer, lines[1])
        starting.join()
        (own,) = started
        self.assertIsNone(own.error())
        send_frame(peer, lines[2])
        said = json.loads(read_frame(peer))["said"]
        self.assertEqual((said["kind"], said["request"], len(said["id"])), ("minted", 1, 256))
        run = {"kind": "run", "lane": 9, "attempt": 1, "run": 7, "send": None, "set": 3, "peers": [], "timeoutMs": 1}
        send_frame(peer, json.dumps({"type": "order", "order": run}))
        said = json.loads(read_frame(peer))["said"]
        self.assertEqual((said["kind"], said["lane"], said["run"], said["code"]), ("notRan", 9, 7, "Unsupported"))
        send_frame(peer, '{"type":"order","order":{"kind":"abort","lane":9,"attempt":1}}')
        self.assertEqual(json.loads(read_frame(peer))["said"], {"kind": "aborted", "lane": 9, "attempt": 1})
        # What is no order ends the connection; the executor does not come again.
        send_frame(peer, '{"type":"order","order":{"kind":"dance"}}')
        self.assertEqual(peer.recv(1), b"")
        fleet.wait_for("error", own.error)
        self.assertEqual(own.error().code, "Unsupported")
        own.stop()


class OfC(unittest.TestCase):
    def test_the_header_is_that_of_the_library(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder, "caller")
            sources = [pathlib.Path(__file__).with_name("caller.c"), fleet.binary("libweightrefit.so")]
            include = f"-I{fleet.ROOT / 'agent/library'}"
            rpath = f"-Wl,-rpath,{pathlib.Path(sources[1]).parent}"
            command = [os.environ.get("CC", "cc"), "-Wall", "-Wextra", "-Werror", "-std=c99", include, "-o", program]
            subprocess.run([*command, *sources, rpath], check=True)
            done = subprocess.run([program, fleet.binary("libweightrefit_fakegpu.so")], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, ""), done.stderr)


if __name__ == "__main__":
    unittest.main()
