"""The driver of a training loop: one call that awaits a refit."""

from __future__ import annotations

import operator
import re
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any
from weakref import WeakSet

from .errors import DeadlineExceeded, Misuse, RefitFailed, Refused, WeightrefitError
from .events import Event, Events, MembershipChanged, Missed, ReplicaFound, ReplicaLost, read
from .report import Report, Status
from .session import ABSENCE_SECONDS, Connected, Session, draw_instance
from .wire import Frame, field

# Seconds beyond the timeout that the agent was given: its own answer says more than ours.
_ANSWER_SECONDS = 5.0


class Refit(Connected):
    """Asks for refits and watches them::

        refit = Refit()
        report = await refit(step)              # or refit.sync(step)

    Talks to the agent that leads, that of training rank 0. Methods may be called from any thread and any event loop.
    """

    def __init__(self, *, socket: str | None = None, absence: float = ABSENCE_SECONDS):
        """Starts to connect.

        Args:
            socket: the agent's socket; by default that of `WEIGHTREFIT_SOCKET`.
            absence: seconds without an agent after which calls raise `AgentUnreachable`.
        """
        super().__init__(socket)
        self._requests: dict[int, tuple[Frame, Future[Any]]] = {}
        self._last = 0
        # Under the session's lock: loops that follow events, the request that asked for them, and the membership as the
        # events have told it, with which a further loop begins.
        self._followers: WeakSet[Events] = WeakSet()
        self._following: int | None = None
        self._membership: MembershipChanged | None = None
        if self._path is not None:
            self._session = Session(
                self._path,
                name="weightrefit driver",
                rank=None,
                instance=draw_instance(),
                absence=absence,
                role=lambda: {"kind": "driver"},
                heard=self._heard,
                joined=self._joined,
                lost=self._lost,
                failed=self._fail_all,
            )
            self._session.start()

    async def __call__(self, step: int, *, wait: str = "all", timeout: float = 300.0) -> Report:
        """Waits until the trainer's `step` has ended everywhere, as far as it will.

        Args:
            step: that the training ranks publish, before or after this call.
            wait: `all`: every replica of the round serves it; `quorum:N`: at least N do.
            timeout: seconds.

        Raises:
            RefitFailed: fewer replicas serve it; its `report` says which and why.
            DeadlineExceeded: the step has not ended in time.
            AgentUnreachable: nobody can be asked.
        """
        import asyncio

        enough = _enough(wait)
        if self._session is None:
            return Report.disabled(step)
        future = self._ask_refit(step, timeout)
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(future), timeout + _ANSWER_SECONDS)
        except WeightrefitError:
            raise  # the agent's answer, which may be that time is over
        except (asyncio.TimeoutError, FutureTimeout) as error:
            raise _late(step, timeout) from error
        return _judge(answer, wait, enough)

    def sync(self, step: int, *, wait: str = "all", timeout: float = 300.0) -> Report:
        """As `await refit(step, ...)`, for programs without an event loop."""
        enough = _enough(wait)
        if self._session is None:
            return Report.disabled(step)
        future = self._ask_refit(step, timeout)
        try:
            answer = future.result(timeout + _ANSWER_SECONDS)
        except WeightrefitError:
            raise
        except FutureTimeout as error:
            future.cancel()
            raise _late(step, timeout) from error
        return _judge(answer, wait, enough)

    async def status(self, timeout: float = 10.0) -> Status:
        """How the agent stands.

        Args:
            timeout: seconds.
        """
        import asyncio

        return await asyncio.to_thread(self.status_sync, timeout)

    def status_sync(self, timeout: float = 10.0) -> Status:
        """As `status`, for programs without an event loop."""
        if self._session is None:
            return Status(epoch=None, leader=None, ranks=(), last_round=None)
        future = self._ask({"type": "status"})
        try:
            return Status.read(future.result(timeout))
        except WeightrefitError:
            raise
        except FutureTimeout as error:
            future.cancel()
            raise DeadlineExceeded("PeerLost", f"the agent did not say how it stands within {timeout:g} s") from error

    def events(self) -> Events:
        """What happens from now on, first the membership that is in effect::

            for event in refit.events():        # or `async for`
                if isinstance(event, RoundEnded):
                    print(event.report.outcome)

        Each call gives a sequence of its own. Who is too slow for it is told `Missed`. Without an agent it is empty.
        """
        session = self._session
        events = Events(session)
        if session is None:
            return events
        with session.changed:
            if self._membership is not None:
                events.put(self._membership)
            self._followers.add(events)
            if self._following is None:
                self._last += 1
                self._following = self._last
                self._follow(session)
        return events

    def _follow(self, session: Session) -> None:
        # Where it cannot be sent, the next connection asks.
        session.send({"type": "events", "request": self._following})

    def _ask_refit(self, step: int, timeout: float) -> Future[Report]:
        return self._ask({"type": "refit", "step": operator.index(step), "timeoutMs": max(int(timeout * 1000), 1)})

    def _ask(self, question: Frame) -> Future[Any]:
        session = self._session
        assert session is not None
        future: Future[Any] = Future()
        with session.changed:
            problem = session.end or session.absence()
            if problem is not None:
                raise problem
            self._last += 1
            request = self._last
            frame = {"type": question["type"], "request": request, **question}
            self._requests[request] = (frame, future)
            # Where it cannot be sent, the next connection asks again.
            session.send(frame)
        future.add_done_callback(lambda _: self._take(request))
        return future

    def _take(self, request: int) -> Future[Any] | None:
        """What waits for the answer, once."""
        assert self._session is not None
        with self._session.changed:
            _, future = self._requests.pop(request, (None, None))
        return future

    def _joined(self) -> None:
        assert self._session is not None
        for frame, _ in self._requests.values():
            self._session.send(frame)
        if self._following is not None:
            self._follow(self._session)

    def _lost(self) -> None:
        assert self._session is not None
        if self._session.end is None:
            self._tell(Missed(None))

    def _fail_all(self, error: WeightrefitError) -> None:
        assert self._session is not None
        with self._session.changed:
            requests = list(self._requests)
            for events in self._followers:
                events.wake()
        for request in requests:
            _settle(self._take(request), error)

    def _heard(self, frame: Frame, fds: list[int]) -> None:
        kind = frame["type"]
        if kind == "event":
            self._tell(read(frame))
            return
        if kind not in ("report", "status", "error"):
            return
        request = field(frame, "request", int)
        if kind == "error" and request == self._following:
            self._refuse_events(Refused(field(frame, "code", str), field(frame, "message", str), remedy=frame.get("hint")))
            return
        future = self._take(request)
        if kind == "report":
            _settle(future, Report.read(field(frame, "report", dict)))
        elif kind == "status":
            _settle(future, field(frame, "status", dict))
        else:
            code, message = field(frame, "code", str), field(frame, "message", str)
            if code == "CommitTimeout":
                _settle(future, DeadlineExceeded(code, message, remedy=frame.get("hint")))
            else:
                _settle(future, Refused(code, message, remedy=frame.get("hint")))

    def _tell(self, event: Event | None) -> None:
        assert self._session is not None
        if event is None:
            return
        with self._session.changed:
            self._membership = _after(self._membership, event)
            for events in self._followers:
                events.put(event)

    def _refuse_events(self, refusal: Refused) -> None:
        assert self._session is not None
        with self._session.changed:
            self._following = None
            for events in self._followers:
                events.refuse(refusal)
            self._followers.clear()


def _after(membership: MembershipChanged | None, event: Event) -> MembershipChanged | None:
    """The membership as it is after an event."""
    if isinstance(event, MembershipChanged):
        return event
    if isinstance(event, Missed):
        return None  # what was missed may be what changed it
    if membership is None or not isinstance(event, (ReplicaLost, ReplicaFound)):
        return membership
    changed = [
        reach._replace(reached=isinstance(event, ReplicaFound)) if (reach.pool, reach.replica) == (event.pool, event.replica) else reach
        for reach in membership.replicas
    ]
    return membership._replace(replicas=tuple(changed))


def _settle(future: Future[Any] | None, answer: Any) -> None:
    if future is None or not future.set_running_or_notify_cancel():
        return  # answered already, or nobody waits any more
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)


def _late(step: int, timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded("CommitTimeout", f"step {step} has not ended within {timeout:g} s, and the agent says nothing")


def _enough(wait: str) -> int | None:
    """How many replicas must serve; `None` for all."""
    if wait == "all":
        return None
    match = re.fullmatch(r"quorum:([1-9]\d{0,5})", wait)
    if match is None:
        raise Misuse("Unsupported", f"wait is `{wait}`, neither `all` nor `quorum:N`")
    return int(match[1])


def _judge(report: Report, wait: str, enough: int | None) -> Report:
    left_out = report.left_out
    serving = len(report.replicas) - len(left_out)
    if serving >= (len(report.replicas) if enough is None else enough) and report.outcome == "Committed":
        return report
    blamed = next((replica for replica in left_out if replica.reason), None)
    code = report.reason or (blamed.reason if blamed else None) or "NotEnoughReady"
    member = report.member or (blamed.member if blamed else None)
    message = f"step {report.step} was {report.outcome.lower()}; {serving} of {len(report.replicas)} replicas serve it, {wait} was asked for"
    raise RefitFailed(code, message, report=report, rank=member)
