"""What a driver is told as it happens."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from .errors import Closed, WeightrefitError
from .report import Report
from .wire import Frame, field

if TYPE_CHECKING:
    from .session import Session

# Events that wait for one loop; the agent's own bound for a driver. Whoever is slower misses the oldest.
WAITING_MAX = 256


class ReplicaReach(NamedTuple):
    """A replica of a membership.

    Attributes:
        pool: its pool.
        replica: its name in the pool.
        reached: whether the leader reaches the agents of all its ranks.
    """

    pool: str
    replica: str
    reached: bool


class MembershipChanged(NamedTuple):
    """The membership that is in effect: the first event where there is one, and again with each epoch.

    Attributes:
        epoch: its number.
        leader: seat whose agent drives rounds.
        replicas: all of them.
    """

    epoch: int
    leader: str
    replicas: tuple[ReplicaReach, ...]


class ReplicaLost(NamedTuple):
    """The leader reaches no more all agents of a replica.

    Attributes:
        pool, replica: which.
        member: first seat that is not reached.
    """

    pool: str
    replica: str
    member: str


class ReplicaFound(NamedTuple):
    """The leader reaches all agents of a replica, for the first time in the epoch or again.

    Attributes:
        pool, replica: which.
    """

    pool: str
    replica: str


class VersionAccepted(NamedTuple):
    """All training ranks have published a step, and it became this version.

    Attributes:
        run, step: the version.
    """

    run: int
    step: int


class RoundOpened(NamedTuple):
    """A round begins.

    Attributes:
        run, step: its version.
        epoch, id: the round, by its membership and its number there.
    """

    run: int
    step: int
    epoch: int
    id: int


class RoundEnded(NamedTuple):
    """A round ended.

    Attributes:
        report: how.
    """

    report: Report


class Missed(NamedTuple):
    """Events were lost between the one before this and the next.

    Attributes:
        number: how many this program was too slow for; `None` where the connection to the agent was made anew.
    """

    number: int | None


Event = Union[MembershipChanged, ReplicaLost, ReplicaFound, VersionAccepted, RoundOpened, RoundEnded, Missed]


def read(frame: Frame) -> Event | None:
    """The `event` of a frame; `None` for one of a kind that this version does not know."""
    value = field(frame, "event", dict)
    kind = field(value, "kind", str)
    if kind == "membershipChanged":
        replicas = tuple(map(_reach, field(value, "replicas", list)))
        return MembershipChanged(field(value, "epoch", int), field(value, "leader", str), replicas)
    if kind == "replicaLost":
        return ReplicaLost(*(field(value, name, str) for name in ("pool", "replica", "member")))
    if kind == "replicaFound":
        return ReplicaFound(*(field(value, name, str) for name in ("pool", "replica")))
    if kind == "versionAccepted":
        return VersionAccepted(*_version(value))
    if kind == "roundOpened":
        return RoundOpened(*_version(value), field(value, "epoch", int), field(value, "id", int))
    if kind == "roundEnded":
        return RoundEnded(Report.read(field(value, "report", dict)))
    if kind == "missed":
        return Missed(field(value, "count", int))
    return None


def _reach(value: Any) -> ReplicaReach:
    value = value if isinstance(value, dict) else {}
    return ReplicaReach(field(value, "pool", str), field(value, "replica", str), field(value, "reached", bool))


def _version(value: Frame) -> tuple[int, int]:
    version = field(value, "version", dict)
    return field(version, "run", int), field(version, "step", int)


class Events(Iterator[Event], AsyncIterator[Event]):
    """What happens from the call of `Refit.events` on: for `for`, or for `async for`.

    It ends when its `Refit` is closed. It raises `Refused` where the agent does not lead, and `AgentUnreachable` while no
    agent is there; after that it may be asked again.
    """

    def __init__(self, session: Session | None):
        self._session = session
        # Under the session's lock: what waits, how many were lost before it, why no more will come.
        self._waiting: deque[Event] = deque()
        self._lost: int | None = 0
        self._refusal: WeightrefitError | None = None
        self._wakes: set[Future[None]] = set()

    def next(self, timeout: float | None = None) -> Event:
        """The next event, for programs without an event loop.

        Args:
            timeout: seconds; `None` waits as long as there is an agent.

        Raises:
            StopIteration: none will come.
            DeadlineExceeded: nothing has happened in time.
        """
        session = self._session
        if session is None:
            raise StopIteration
        try:
            session.wait(self._ready, timeout, "nothing has happened", "NoSource")
        except Closed:
            raise StopIteration from None
        with session.changed:
            return self._take()

    def __next__(self) -> Event:
        return self.next()

    async def __anext__(self) -> Event:
        import asyncio

        session = self._session
        if session is None:
            raise StopAsyncIteration
        while True:
            wake: Future[None] = Future()
            with session.changed:
                if self._ready():
                    return self._take()
                problem = session.end or session.absence()
                if isinstance(problem, Closed):
                    raise StopAsyncIteration
                if problem is not None:
                    raise problem.with_traceback(None)
                self._wakes.add(wake)
            await asyncio.wrap_future(wake)

    def put(self, event: Event) -> None:
        """Adds an event. Under the session's lock."""
        if len(self._waiting) == WAITING_MAX:
            oldest = self._waiting.popleft()
            more = oldest.number if isinstance(oldest, Missed) else 1
            self._lost = None if self._lost is None or more is None else self._lost + more
        self._waiting.append(event)
        self.wake()

    def refuse(self, refusal: WeightrefitError) -> None:
        """No more will come. Under the session's lock."""
        self._refusal = refusal
        self.wake()

    def wake(self) -> None:
        """Makes whoever waits look again. Under the session's lock."""
        assert self._session is not None
        self._session.changed.notify_all()
        while self._wakes:
            wake = self._wakes.pop()
            if wake.set_running_or_notify_cancel():
                wake.set_result(None)

    def _ready(self) -> bool:
        return bool(self._waiting) or self._lost != 0 or self._refusal is not None

    def _take(self) -> Event:
        if self._lost != 0:
            lost, self._lost = self._lost, 0
            return Missed(lost)
        if self._waiting:
            return self._waiting.popleft()
        assert self._refusal is not None
        raise self._refusal.with_traceback(None)
