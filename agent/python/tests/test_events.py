"""Events for drivers: from real agents, and from an agent in the hands of the test."""

import asyncio
import json
import pathlib
import sys
import threading
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402
from fleet import together  # noqa: E402
from listener import Listener, read_frame, send_frame  # noqa: E402
from tiny import replica_names  # noqa: E402
from test_refit import RefitTest  # noqa: E402

import weightrefit  # noqa: E402
from weightrefit import MembershipChanged, Missed, ReplicaFound, ReplicaLost, ReplicaReach, RoundEnded, RoundOpened, VersionAccepted  # noqa: E402
from weightrefit.events import WAITING_MAX  # noqa: E402


class OfAgents(RefitTest):
    REPLICAS = 2

    def reached(self, events):
        """The membership that is told first, once all its replicas are reached, and those that were found meanwhile."""
        membership = events.next(fleet.PATIENCE)
        missing = [reach.replica for reach in membership.replicas if not reach.reached]
        found = sorted(events.next(fleet.PATIENCE).replica for _ in missing)
        self.assertEqual(found, missing)
        return membership

    def test_a_loop_hears_of_rounds_and_of_replicas_that_go_and_come(self):
        events = self.refit.events()
        first, second = replica_names(self.fleet)
        membership = self.reached(events)
        self.assertEqual((membership.epoch, membership.leader), (1, "training/0"))
        self.assertEqual([reach[:2] for reach in membership.replicas], [("default", first), ("default", second)])
        self.publish(3)
        report = self.refit.sync(3, timeout=fleet.PATIENCE)
        self.released()
        want = [VersionAccepted(0, 3), RoundOpened(0, 3, 1, 1), RoundEnded(report)]
        self.assertEqual([events.next(fleet.PATIENCE) for _ in want], want)

        seat = f"inference/default/{first}/0"
        self.fleet.restart(self.fleet.pod_of(seat))
        self.assertEqual(events.next(fleet.PATIENCE), ReplicaLost("default", first, seat))
        self.assertEqual(self.reached(events).epoch, 2)
        # Who begins now hears of the membership as it is.
        late = self.refit.events().next(fleet.PATIENCE)
        self.assertEqual(late, MembershipChanged(2, "training/0", (ReplicaReach("default", first, True), ReplicaReach("default", second, True))))

    def test_an_event_loop_follows_while_it_awaits_a_step(self):
        async def follow():
            heard = []
            async for event in self.refit.events():
                heard.append(event)
                if isinstance(event, RoundEnded):
                    return heard

        async def refitted():
            following = asyncio.create_task(follow())
            await asyncio.sleep(0)
            await asyncio.to_thread(self.publish, 1)
            report = await self.refit(1, timeout=fleet.PATIENCE)
            return report, await asyncio.wait_for(following, fleet.PATIENCE)

        report, heard = asyncio.run(refitted())
        self.assertIsInstance(heard[0], MembershipChanged)
        self.assertEqual(heard[-1], RoundEnded(report))
        together(*(rank.wait_released for rank in self.trainers))

    def test_only_the_leaders_agent_tells(self):
        with weightrefit.Refit(socket=self.fleet.socket_of("training/1")) as elsewhere:
            events = elsewhere.events()
            for _ in range(2):
                with self.assertRaises(weightrefit.Refused) as raised:
                    events.next(fleet.PATIENCE)
                self.assertEqual(raised.exception.message, "rounds are led by the agent of training/0: ask that one")
            with self.assertRaises(weightrefit.Refused):
                elsewhere.events().next(fleet.PATIENCE)  # asks again


def frame(event):
    return json.dumps({"type": "event", "event": event})


def found(number):
    return {"kind": "replicaFound", "pool": "p", "replica": str(number)}


class OfAListener(unittest.TestCase):
    def setUp(self):
        self.listener = Listener(self)
        self.refit = weightrefit.Refit(socket=self.listener.path)
        self.addCleanup(self.refit.close)
        self.peer = self.accept()

    def accept(self):
        peer = self.listener.accept()
        self.addCleanup(peer.close)
        self.assertIn('"hello"', read_frame(peer))
        return peer

    def test_a_slow_loop_misses_the_oldest_and_is_told_how_many(self):
        slow, more = self.refit.events(), 7
        send_frame(self.peer, frame({"kind": "missed", "count": 5}))
        for number in range(WAITING_MAX + more):
            send_frame(self.peer, frame(found(number)))
        # Frames are taken in order: who has its answer has all events before it.
        self.assertEqual(read_frame(self.peer), '{"type":"events","request":1}')
        asked = threading.Thread(target=self.refit.status_sync, daemon=True)
        asked.start()
        self.assertEqual(read_frame(self.peer), '{"type":"status","request":2}')
        send_frame(self.peer, '{"type":"status","request":2,"status":{"ranks":[]}}')
        asked.join()
        self.assertEqual(slow.next(0), Missed(5 + more))
        kept = [slow.next(0) for _ in range(WAITING_MAX)]
        self.assertEqual(kept, [ReplicaFound("p", str(number)) for number in range(more, WAITING_MAX + more)])
        with self.assertRaises(weightrefit.DeadlineExceeded):
            slow.next(0)

    def test_a_connection_that_is_made_anew_may_have_missed_anything(self):
        events = self.refit.events()
        self.peer.close()
        peer = self.accept()
        self.assertEqual(read_frame(peer), '{"type":"events","request":1}')
        send_frame(peer, frame(found(1)))
        self.assertEqual([events.next(fleet.PATIENCE) for _ in range(2)], [Missed(None), ReplicaFound("p", "1")])

    def test_the_end_of_the_client_is_the_end_of_its_loops(self):
        heard = []

        def follow():
            heard.extend(self.refit.events())

        async def follow_too():
            return [event async for event in self.refit.events()]

        loops = [threading.Thread(target=follow), threading.Thread(target=lambda: heard.extend(asyncio.run(follow_too())))]
        for loop in loops:
            loop.start()
        fleet.wait_for("loops", lambda: len(self.refit._followers) == len(loops))
        self.refit.close()
        for loop in loops:
            loop.join()
        self.assertEqual(heard, [])
        self.assertEqual(list(self.refit.events()), [])

    def test_a_loop_that_is_given_up_leaves_nothing_behind(self):
        async def give_up():
            with self.assertRaises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(self.refit.events()), 0.01)

        asyncio.run(give_up())
        self.assertEqual(len(self.refit._followers), 0)


if __name__ == "__main__":
    unittest.main()
