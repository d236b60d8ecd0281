"""What no agent sends, agents that are not there, and no agent at all."""

import gc
import os
import pathlib
import struct
import sys
import tempfile
import threading
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
from listener import Listener, read_frame, send_frame  # noqa: E402

import weightrefit  # noqa: E402
from weightrefit import session, wire  # noqa: E402

ROUND = '"round":{"epoch":1,"round":1}'
STAGING = '{"type":"staging","bytes":%d,"tensors":[%s]}'
PLACE = '{"name":"w","offset":%d,"bytes":%d}'


def frame(kind, round, step=None):
    """A frame of an agent to an engine."""
    version = "" if step is None else ',"version":{"run":0,"step":%d,"origin":1,"sum":"00"}' % step
    policy = {"pause": ',"inFlight":"Keep"', "commit": ',"kvCache":"Reset"'}.get(kind, "")
    return '{"type":"%s","round":{"epoch":1,"round":%d}%s%s}' % (kind, round, version, policy)


def descriptors():
    gc.collect()  # what earlier tests left
    return len(os.listdir("/proc/self/fd"))


class Callbacks:
    def __getattr__(self, name):
        raise AssertionError(f"{name} was called")


class HostileFrames(unittest.TestCase):
    def refused(self, hostile, *fds):
        """Sends it to an engine rank and returns how its `register` ends."""
        listener = Listener(self)
        tensors = [weightrefit.Tensor("w", "f32", (4, 4))]
        rank = weightrefit.Engine("default", "a", 0, tensors, Callbacks(), socket=listener.path)
        raised = []

        def register():
            try:
                rank.register(fleet.PATIENCE)
            except weightrefit.WeightrefitError as error:
                raised.append(error)

        registering = threading.Thread(target=register)
        with self.assertLogs("weightrefit"):
            registering.start()
            peer = listener.accept()
            if isinstance(hostile, bytes):
                peer.sendall(hostile)
            else:
                send_frame(peer, hostile, fds)
            registering.join()
        peer.close()
        listener.listener.close()
        self.assertNotIn(f"weightrefit {rank.seat}", [thread.name for thread in threading.enumerate()])
        return raised

    def test_what_is_no_frame_ends_the_client_with_a_reason(self):
        rows = [
            (struct.pack("<I", wire.FRAME_BYTES_MAX + 1), "longer"),
            (b"\xff\xff\xff\xff", "longer"),
            (struct.pack("<I", 4) + b"\xff\xfe\x00\x01", "no JSON"),
            ("", "no JSON"),
            ("{", "no JSON"),
            ("[" * 100_000, "no JSON"),
            ("[]", "no object with a `type`"),
            ("7", "no object with a `type`"),
            ('{"type":7}', "no object with a `type`"),
            ('{"type":"welcome"}', "has no int `protocol`"),
            ('{"type":"welcome","protocol":true}', "has no int `protocol`"),
            ('{"type":"welcome","protocol":2}', "agent speaks protocol 2"),
            ('{"type":"error","code":7}', "has no str `code`"),
            ('{"type":"pause"}', "has no dict `round`"),
            ('{"type":"pause","round":{"epoch":"1"}}', "has no int `epoch`"),
            ('{"type":"pause",%s,"inFlight":"Later"}' % ROUND, "has inFlight `Later`"),
            ('{"type":"commit",%s}' % ROUND, "has no dict `version`"),
            (frame("commit", 1, 7)[:-1] + ',"extras":{}}', "has no str `extras`"),
            (frame("commit", 1, 7)[:-1] + ',"extras":"{"}', "extras that are no JSON"),
            ('{"type":"resume",%s,"version":{}}' % ROUND, "has no int `run`"),
            ('{"type":"staging"}', "has no int `bytes`"),
            (STAGING % (64, PLACE % (0, 64)), "staging came with 0 descriptors"),
        ]
        for hostile, message in rows:
            with self.subTest(hostile[:60]):
                (error,) = self.refused(hostile)
                self.assertIsInstance(error, weightrefit.ProtocolError)
                self.assertRegex(str(error), message)

    def test_staging_that_is_not_as_said_is_not_mapped(self):
        memory = weightrefit.Memory(64)
        unsealed = os.memfd_create("unsealed")
        self.addCleanup(os.close, unsealed)
        os.ftruncate(unsealed, 64)
        with tempfile.TemporaryFile() as file:
            file.truncate(64)
            rows = [
                (STAGING % (64, PLACE % (0, 64)), [unsealed], "not sealed"),
                (STAGING % (64, PLACE % (0, 64)), [file.fileno()], "cannot be mapped"),
                (STAGING % (128, PLACE % (0, 64)), [memory.fd], "cannot be mapped"),
                (STAGING % (-1, PLACE % (0, 64)), [memory.fd], "cannot be mapped"),
                (STAGING % (64, PLACE % (0, 64)), [memory.fd, memory.fd], "2 descriptors"),
                (STAGING % (64, PLACE % (1, 64)), [memory.fd], "`w` at 1"),
                (STAGING % (64, PLACE % (-64, 64)), [memory.fd], "`w` at -64"),
                (STAGING % (64, PLACE % (0, 60)), [memory.fd], "60 bytes"),
                (STAGING % (64, '{"name":"v","offset":0,"bytes":64}'), [memory.fd], "`v`"),
                (STAGING % (64, "7"), [memory.fd], "has no str `name`"),
                (STAGING % (64, ""), [memory.fd], "lacks 1 tensors, the first is `w`"),
            ]
            for hostile, fds, message in rows:
                with self.subTest(message):
                    (error,) = self.refused(hostile, *fds)
                    self.assertIsInstance(error, weightrefit.ProtocolError)
                    self.assertRegex(str(error), message)

    def test_more_descriptors_than_a_frame_may_carry_end_the_client(self):
        memory = weightrefit.Memory(64)
        (error,) = self.refused('{"type":"welcome","protocol":1}', *[memory.fd] * (wire.FRAME_FDS_MAX + 1))
        self.assertRegex(str(error), "more than 64 descriptors")

    def test_descriptors_are_closed_whatever_they_came_with(self):
        memory = weightrefit.Memory(64)
        for hostile in ("{", '{"type":"welcome","protocol":2}', STAGING % (64, ""), '{"type":"pause"}'):
            self.refused(hostile, memory.fd)
        before = descriptors()
        for hostile in ("{", '{"type":"welcome","protocol":2}', STAGING % (64, ""), '{"type":"pause"}'):
            with self.subTest(hostile):
                self.refused(hostile, memory.fd)
                self.assertEqual(descriptors(), before)

    def test_a_stream_that_ends_inside_a_frame_is_an_agent_that_is_gone(self):
        listener = Listener(self)
        tensors = weightrefit.place([weightrefit.Tensor("a", "f32", (1,))])
        with weightrefit.Trainer(0, "w", socket=listener.path) as rank:
            registering = threading.Thread(target=rank.register, args=(tensors,))
            registering.start()
            for cut in (b"\x05", struct.pack("<I", 99) + b'{"type"'):
                peer = listener.accept()
                peer.sendall(cut)
                peer.close()
            peer = listener.accept()
            self.addCleanup(peer.close)
            send_frame(peer, '{"type":"unheard of"}')
            send_frame(peer, '{"type":"registered"}')
            registering.join()


class EngineRules(unittest.TestCase):
    """E3 to E5 of the engine, in the order in which a wrong or late agent would break them."""

    def setUp(self):
        self.listener = Listener(self)
        self.calls = []

    def start(self, callbacks):
        """A registered engine rank and its agent's end of the socket."""
        tensors = [weightrefit.Tensor("w", "f32", (4, 4))]
        rank = weightrefit.Engine("p", "r", 0, tensors, callbacks, socket=self.listener.path)
        self.addCleanup(rank.close)
        registering = threading.Thread(target=rank.register)
        registering.start()
        peer = self.accept()
        send_frame(peer, '{"type":"registered"}')
        registering.join()
        return rank, peer

    def accept(self):
        peer = self.listener.accept()
        self.addCleanup(peer.close)
        self.hello = read_frame(peer)
        read_frame(peer)
        return peer

    def play(self, peer, frames):
        for sent, answer in frames:
            send_frame(peer, sent)
            self.assertIn(answer, read_frame(peer), sent)

    def test_a_cold_engine_serves_nothing_and_older_rounds_are_refused(self):
        rank, peer = self.start(Callbacks())
        with self.assertLogs("weightrefit"):
            self.play(
                peer,
                [
                    (frame("resume", 1, 7), "EngineRefused"),
                    (frame("abort", 1), '"type":"aborted"'),
                    (frame("pause", 2), '"type":"paused"'),
                    (frame("pause", 1), "StaleEpoch"),
                    (frame("commit", 1, 7), "StaleEpoch"),
                    (frame("commit", 2, 7), "no staging"),
                    (frame("resume", 2, 7), "the rank is dirty"),
                ],
            )
        self.assertIsNone(rank.served_version)

    def test_a_serving_engine_changes_only_while_paused_and_never_to_an_older_version(self):
        rank, peer = self.start(self)
        memory = weightrefit.Memory(64)
        send_frame(peer, STAGING % (64, PLACE % (0, 64)), [memory.fd])
        with self.assertLogs("weightrefit"):
            self.play(
                peer,
                [
                    (frame("pause", 1), '"state":"cold"'),
                    (frame("commit", 1, 7), '"state":"applied"'),
                    (frame("commit", 1, 7), '"state":"applied"'),
                    (frame("resume", 1, 6), "EngineRefused"),
                    (frame("abort", 1), '"state":"applied"'),
                    (frame("resume", 1, 7), '"state":"serving"'),
                    (frame("resume", 1, 7), '"type":"resumed"'),
                    (frame("commit", 1, 8), "not paused"),
                    (frame("pause", 2), '"state":"quiet"'),
                    (frame("pause", 2), '"state":"quiet"'),
                    (frame("commit", 2, 6), "VersionRegressed"),
                    (frame("abort", 2), '"state":"serving"'),
                    (frame("pause", 3), '"state":"quiet"'),
                ],
            )
        apply, resume = ["apply", "commit"], ["resume"]
        self.assertEqual(self.calls, apply * 2 + resume + ["pause"] + resume + ["pause"])
        peer.close()
        # The agent's end is as good as an abort, and the next agent hears of it.
        self.accept()
        self.assertIn('"state":"serving","round":{"epoch":1,"round":3}', self.hello)
        self.assertEqual((self.calls[-1], rank.served_version.step), ("resume", 7))

    def test_an_engine_that_does_not_resume_is_not_taken_for_serving(self):
        rank, peer = self.start(self)
        memory = weightrefit.Memory(64)
        send_frame(peer, STAGING % (64, PLACE % (0, 64)), [memory.fd])
        self.play(peer, [(frame("pause", 1), "paused"), (frame("commit", 1, 7), "applied")])
        self.wrong = True
        with self.assertLogs("weightrefit"):
            self.play(peer, [(frame("resume", 1, 7), "did not resume")])
        self.assertIsNone(rank.served_version)
        self.wrong = False
        self.play(peer, [(frame("resume", 1, 7), "resumed")])

    wrong = False

    def pause(self, in_flight):
        self.calls.append("pause")

    def apply(self, staging):
        self.calls.append("apply")

    def commit(self, version, kv_cache, extras):
        self.calls.append("commit")
        return []

    def resume(self, version):
        self.calls.append("resume")
        if self.wrong:
            raise RuntimeError("the port is taken")


class NoAgent(unittest.TestCase):
    def test_an_absent_agent_ends_every_wait_and_is_named(self):
        path = "/nonexistent/agent.sock"
        tensors = weightrefit.place([weightrefit.Tensor("a", "f32", (1,))])
        trainer = weightrefit.Trainer(0, "w", socket=path, absence=0.05)
        engine = weightrefit.Engine("p", "r", 0, [], Callbacks(), socket=path, absence=0.05)
        with self.assertLogs("weightrefit"), weightrefit.Refit(socket=path, absence=0.05) as refit:
            calls = [lambda: trainer.register(tensors), engine.register, lambda: refit.sync(1), refit.status_sync]
            for call in calls:
                with self.assertRaises(weightrefit.AgentUnreachable) as raised:
                    call()
                self.assertIn(path, raised.exception.message)
                self.assertIn("--socket", raised.exception.remedy)

    def test_without_a_socket_everything_does_nothing_and_says_so_once(self):
        with mock.patch.dict(os.environ), mock.patch.object(session, "_told_disabled", False):
            os.environ.pop("WEIGHTREFIT_SOCKET", None)
            with self.assertLogs("weightrefit") as log:
                trainer = weightrefit.Trainer(0, "w")
                engine = weightrefit.Engine("p", "r", 0, [], Callbacks())
                refit = weightrefit.Refit()
                trainer.register([])
                trainer.publish(1)
                self.assertIs(trainer.wait_released(), weightrefit.Outcome.DISABLED)
                engine.register()
                self.assertEqual(refit.sync(1), weightrefit.Report.disabled(1))
                self.assertEqual(refit.status_sync().ranks, ())
                for client in (trainer, engine, refit):
                    self.assertFalse(client.enabled)
                    client.close()
        self.assertEqual(len(log.output), 1, log.output)
        self.assertIn("WEIGHTREFIT_SOCKET is not set", log.output[0])

    def test_the_environment_names_the_socket(self):
        with mock.patch.dict(os.environ, {"WEIGHTREFIT_SOCKET": "/nonexistent/agent.sock"}):
            self.assertTrue(weightrefit.Trainer(0, "w").enabled)


class WrongArguments(unittest.TestCase):
    def test_what_cannot_be_is_refused_at_once(self):
        memory = weightrefit.Memory(64)
        tensor = weightrefit.Tensor("a", "f32", (4, 4))
        rows = [
            lambda: weightrefit.Tensor("a", "float32", (1,)),
            lambda: weightrefit.Tensor("a", "f32", (-1,)),
            lambda: weightrefit.Memory(0),
            lambda: weightrefit.Placed(tensor, memory, 4),
            lambda: weightrefit.Placed(tensor, memory, -4),
            lambda: weightrefit.Trainer(-1, "w", socket="s"),
            lambda: weightrefit.Trainer(0, "", socket="s"),
            lambda: weightrefit.Trainer(0, "w" * 65, socket="s"),
            lambda: weightrefit.Trainer(0, "w", socket="s").publish(1),
        ]
        for call in rows:
            with self.assertRaises(weightrefit.Misuse) as raised:
                call()
            self.assertTrue(raised.exception.code and raised.exception.remedy)


if __name__ == "__main__":
    unittest.main()
