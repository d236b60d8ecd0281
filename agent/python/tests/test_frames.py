"""The frames of docs/agent-socket.md: a Rust test replays them against a real agent, this one against real clients.

What the page says a client sends must be what the Python client sends, byte for byte; what it says the agent answers is
what the client is given.
"""

import json
import pathlib
import sys
import threading
import unittest
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
from listener import Listener, read_exactly, read_frame, send_frame  # noqa: E402

import weightrefit  # noqa: E402
from weightrefit import engine, trainer, wire  # noqa: E402
from weightrefit.recording import Piece  # noqa: E402

PAGE = (fleet.ROOT / "docs/agent-socket.md").read_text()


def blocks(kind):
    return [part.split("```")[0].strip().splitlines() for part in PAGE.split(f"```{kind}\n")[1:]]


class Documented(unittest.TestCase):
    def test_an_engines_first_refit_is_byte_for_byte_that_of_the_page(self):
        (lines,) = blocks("frames")
        listener, calls = Listener(self), []

        class Callbacks:
            def pause(self, in_flight):
                calls.append("pause")

            def apply(self, staging):
                for group in staging.groups():
                    calls.append((group.name, group.kind, {name: bytes(content) for name, content in group.items()}))

            def commit(self, version, kv_cache, extras):
                calls.append(("commit", version.step, kv_cache))
                return ["prefix"]

            def resume(self, version):
                calls.append(("resume", version.step))

        with mock.patch.object(engine, "draw_instance", return_value="e1" * 16):
            tensors = [weightrefit.Tensor("w", "f32", (4, 4), (Piece("w", None, (((0, 0, 4),), ((0, 0, 4),))),))]
            groups = [weightrefit.Group("m", weightrefit.GroupClass.DIRECT, ("w",))]
            rank = weightrefit.Engine("default", "a", 0, tensors, Callbacks(), groups=groups, socket=listener.path)
        self.addCleanup(rank.close)
        registering = threading.Thread(target=rank.register)
        registering.start()
        peer = listener.accept()
        self.addCleanup(peer.close)
        content = bytes(range(64))
        for line in lines:
            arrow, prefix, rest = line.split(" ", 2)
            text, _, fd = rest.partition(" + fd")
            if arrow == "→":
                got = read_exactly(peer, 4 + len(text.encode()))
                self.assertEqual((got[:4].hex(), got[4:].decode()), (prefix, text))
            elif " + fd" in rest:
                staging = weightrefit.Memory(64)
                staging.buffer[:] = content
                send_frame(peer, text, [staging.fd])
            else:
                send_frame(peer, text)
        registering.join()
        self.assertEqual(rank.wait_served(7, fleet.PATIENCE).sum, "cfb51b7ff6b542322b3fbe66e3ab5a4d")
        self.assertEqual(calls, [("m", weightrefit.GroupClass.DIRECT, {"w": content}), ("commit", 7, weightrefit.KvCache.RESET), ("resume", 7)])

    def test_what_trainers_and_drivers_send_is_what_the_page_shows(self):
        sent, *_ = blocks("json")
        hello, first, second, publish, more, driver, refit, status, events = sent
        listener = Listener(self)
        a, b = weightrefit.Memory(4096), weightrefit.Memory(64)
        placed = [
            weightrefit.Placed(weightrefit.Tensor("a", "f32", (16, 64)), a, 0),
            weightrefit.Placed(weightrefit.Tensor("b", "f32", (16,)), b, 0),
        ]
        with mock.patch.multiple(trainer, draw_instance=lambda: "71" * 16, PAGE_TENSORS=1):
            rank = weightrefit.Trainer(0, "run-17", socket=listener.path)
            self.addCleanup(rank.close)
            registering = threading.Thread(target=rank.register, args=(placed,))
            registering.start()
            peer = listener.accept()
            self.addCleanup(peer.close)
            self.assertEqual([read_frame(peer) for _ in range(3)], [hello, first, second])
        send_frame(peer, '{"type":"registered"}')
        registering.join()
        rank.publish(7)
        self.assertEqual(read_frame(peer), publish)
        send_frame(peer, '{"type":"released","step":7,"outcome":"Read"}')
        rank.wait_released(fleet.PATIENCE)
        rank.publish(8, extras={"scale": 0.5})
        self.assertEqual(read_frame(peer), more)
        with mock.patch("weightrefit.driver.draw_instance", return_value="72" * 16):
            asking = weightrefit.Refit(socket=listener.path)
        self.addCleanup(asking.close)
        peer = listener.accept()
        self.addCleanup(peer.close)
        self.assertEqual(read_frame(peer), driver)
        asking._ask_refit(7, 60.0)
        asking._ask({"type": "status"})
        asking.events()
        self.assertEqual([read_frame(peer), read_frame(peer), read_frame(peer)], [refit, status, events])

    def test_what_an_agent_says_is_understood(self):
        _, received, *_ = blocks("json")
        for line, raised in zip(received, (None, weightrefit.PublishRefused, weightrefit.Refused)):
            frame = json.loads(line)
            with self.subTest(frame["type"]):
                listener = Listener(self)
                rank = weightrefit.Trainer(1, "run-17", socket=listener.path)
                self.addCleanup(rank.close)
                tensors = weightrefit.place([weightrefit.Tensor("a", "f32", (1,))])
                registering = threading.Thread(target=rank.register, args=(tensors,))
                registering.start()
                peer = listener.accept()
                self.addCleanup(peer.close)
                send_frame(peer, '{"type":"registered"}')
                registering.join()
                rank.publish(7)
                if raised is weightrefit.Refused:
                    # Of a client that is registered it only ends the connection; the next one is refused for good.
                    with self.assertLogs("weightrefit"):
                        send_frame(peer, line)
                        peer.close()
                        peer = listener.accept()
                        self.addCleanup(peer.close)
                        send_frame(peer, line)
                        with self.assertRaises(raised) as error:
                            rank.wait_released(fleet.PATIENCE)
                    self.assertEqual((error.exception.code, error.exception.remedy), (frame["code"], frame["hint"]))
                    continue
                send_frame(peer, line)
                if raised is None:
                    self.assertEqual(rank.wait_released(fleet.PATIENCE).value, frame["outcome"])
                    continue
                with self.assertRaises(raised) as error:
                    rank.wait_released(fleet.PATIENCE)
                self.assertEqual((error.exception.code, error.exception.message), (frame["code"], frame["message"]))

    def test_every_event_of_the_page_is_understood(self):
        _, received, *_ = blocks("json")
        listener = Listener(self)
        with weightrefit.Refit(socket=listener.path) as asking:
            peer = listener.accept()
            self.addCleanup(peer.close)
            told = asking.events()
            reach = weightrefit.ReplicaReach
            want = [
                weightrefit.MembershipChanged(2, "training/0", (reach("default", "a", True), reach("default", "b", False))),
                weightrefit.ReplicaFound("default", "b"),
                weightrefit.VersionAccepted(0, 7),
                weightrefit.RoundOpened(0, 7, 2, 1),
                weightrefit.ReplicaLost("default", "b", "inference/default/b/0"),
            ]
            lines = [line for line in received if '"type":"event"' in line]
            send_frame(peer, '{"type":"event","event":{"kind":"ofALaterVersion"}}')
            for line in lines:
                send_frame(peer, line)
            self.assertEqual([told.next(fleet.PATIENCE) for _ in want], want)
            ended = told.next(fleet.PATIENCE)
            self.assertEqual((type(ended), ended.report.step, ended.report.left_out[0].replica), (weightrefit.RoundEnded, 7, "b"))
            self.assertEqual(told.next(fleet.PATIENCE), weightrefit.Missed(12))
            self.assertEqual(len(lines), len(want) + 2)

    def test_a_frame_is_a_length_and_one_object(self):
        self.assertEqual(wire.encode({"type": "ä"}), b"\x0d\x00\x00\x00" + '{"type":"ä"}'.encode())
        with self.assertRaises(weightrefit.ProtocolError):
            wire.encode({"type": "x" * wire.FRAME_BYTES_MAX})


if __name__ == "__main__":
    unittest.main()
