"""An inference rank: pauses at a step boundary, takes new weights out of staging, serves.

The rules are those of docs/protocol.md, section 7, as `core::round::engine` has them:

* E1: a new process is cold and serves nothing; neither a cold nor a dirty rank ever serves.
* E2: the record says dirty before the first live byte is written, and applied only after the last.
* E3: it serves again only by `resume` for exactly what is live, or by `abort` or the agent's end while quiet. No timer
  resumes.
* E4: `commit` takes no version older than the live one unless the tensors are dirty or cold, and never while serving.
* E5: a request of a round older than the newest that paused it is refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .errors import Misuse, ProtocolError
from .executor import RankClient
from .memory import Staging
from .record import EngineState, InFlight, KvCache, Record, Round, Version
from .session import ABSENCE_SECONDS, Session, draw_instance
from .tensor import Group, Tensor
from .trainer import PAGE_TENSORS
from .wire import Frame, choice, field

if TYPE_CHECKING:
    import asyncio

logger = logging.getLogger("weightrefit")


class EngineCallbacks(Protocol):
    """What an engine rank does when its agent asks.

    They run one after the other on the client's thread, or, where they are coroutine functions, on the event loop that
    `Engine` was given. What they raise is told to the agent and leaves the replica fenced or serving what it served;
    nothing is raised into the engine.
    """

    def pause(self, in_flight: InFlight) -> Any:
        """Stops at a step boundary, does with requests as said, and returns when the rank runs no step. Raising means
        that it still serves."""

    def apply(self, staging: Staging) -> Any:
        """Copies all of `staging` to the live tensors, pads zeroed, and recomputes what derives from them. An engine
        that has registered groups takes them one by one, `for group in staging.groups()`, to the last. Raising leaves
        the rank dirty: it does not serve until a later version was applied whole."""

    def commit(self, version: Version, kv_cache: KvCache, extras: Any) -> Any:
        """Empties the caches that `version` makes stale, and returns their names (`["prefix"]`). Keys and values are
        among them as said. `extras` is what training rank 0 published beside the version, or `None`."""

    def resume(self, version: Version) -> Any:
        """Serves `version`, which the live tensors hold."""


class Engine(RankClient):
    """One inference rank::

        engine = Engine("default", replica, rank, tensors, callbacks)
        engine.register()
        ...                                     # the callbacks do the rest
        engine.close()

    Without a client of this rank the replica takes part in no round.
    """

    def __init__(
        self,
        pool: str,
        replica: str,
        rank: int,
        tensors: Iterable[Tensor],
        callbacks: EngineCallbacks,
        *,
        groups: Sequence[Group] = (),
        socket: str | None = None,
        absence: float = ABSENCE_SECONDS,
        loop: asyncio.AbstractEventLoop | None = None,
    ):
        """Does nothing yet.

        Args:
            pool: of the refit, as in the resource.
            replica: name of this engine instance in the pool.
            rank: of this process in the replica.
            tensors: all local tensors that the layout gives this rank. The live ones stay private to this process.
            callbacks: what to do.
            groups: tensors that are processed together, in the order in which `apply` takes them: all tensors, each
                in one group. Without any, `apply` takes them as it likes.
            socket: the agent's socket; by default that of `WEIGHTREFIT_SOCKET`.
            absence: seconds without an agent after which `register` raises `AgentUnreachable`.
            loop: runs callbacks that are coroutine functions; it must run in another thread than `register` blocks.
        """
        super().__init__(socket)
        self.seat = f"inference/{pool}/{replica}/{rank}"
        self._place = {"pool": pool, "replica": replica, "rank": rank}
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._groups = tuple(groups)
        grouped = [name for group in self._groups for name in group.tensors]
        if self._groups and (len(grouped) != len(self._tensors) or set(grouped) != set(self._tensors)):
            raise Misuse("RegistrationMismatch", "groups do not have every tensor once", rank=self.seat)
        self._callbacks, self._loop, self._absence = callbacks, loop, absence
        self._record = Record(draw_instance())
        self._staging: Staging | None = None

    @property
    def state(self) -> EngineState:
        """Of this rank, as of now."""
        return self._record.state

    @property
    def live_version(self) -> Version | None:
        """What the live tensors hold entirely, if they do."""
        return self._record.live

    @property
    def served_version(self) -> Version | None:
        """What this rank serves now; `None` while it serves nothing."""
        return self._record.live if self._record.state is EngineState.SERVING else None

    def register(self, timeout: float | None = 300.0) -> None:
        """Shows the rank's tensors to the agent, again after each reconnect, and waits until it has taken them.

        That takes a membership: all agents of the refit must be there.

        Args:
            timeout: seconds; `None` waits as long as there is an agent.

        Raises:
            Refused: with `RegistrationMismatch` and the first five differences where the layout says otherwise.
            AgentUnreachable: no agent listens.
            DeadlineExceeded: the agent had no membership in time.
        """
        if self._path is None:
            return
        if self._session is not None:
            raise Misuse("RegistrationMismatch", "this engine rank is registered already", rank=self.seat)
        session = Session(
            self._path,
            name=f"weightrefit {self.seat}",
            rank=self.seat,
            instance=self._record.instance,
            absence=self._absence,
            role=self._role,
            pages=_pages(self._tensors, self._groups),
            heard=self._heard,
            lost=self._lost,
        )
        self._register(session, timeout)

    def wait_served(self, step: int, timeout: float | None = None) -> Version:
        """Waits until this rank serves `step` or a later one of the same or a later run.

        Args:
            step: the trainer's step.
            timeout: seconds; `None` waits as long as there is an agent.

        Raises:
            ExecutorFailed: with `AgentWedged` where this process must end (`start_executor`).
        """
        if self._session is None:
            raise Misuse("RegistrationMismatch", "call `register` first", rank=self.seat)

        def done() -> bool:
            self._check_executor()
            served = self.served_version
            return served is not None and served.step >= step

        self._session.wait(done, timeout, f"step {step} is not served", "CommitTimeout")
        served = self.served_version
        assert served is not None
        return served

    def _role(self) -> Frame:
        return {"kind": "engine", **self._place, "record": self._record.json()}

    def _heard(self, frame: Frame, fds: list[int]) -> None:
        kind = frame["type"]
        if kind == "staging":
            self._staging = Staging(frame, fds, self._tensors, self._groups)
        elif kind == "pause":
            self._pause(Round.read(frame), choice(frame, "inFlight", InFlight))
        elif kind == "commit":
            self._commit(Round.read(frame), Version.read(frame), choice(frame, "kvCache", KvCache), _extras(frame))
        elif kind == "resume":
            self._resume(Round.read(frame), Version.read(frame))
        elif kind == "abort":
            self._serve_if_quiet()
            self._answer("aborted", Round.read(frame))

    def _lost(self) -> None:
        self._staging = None
        self._serve_if_quiet()

    def _pause(self, round: Round, in_flight: InFlight) -> None:
        record = self._record
        if round < record.round:
            return self._fail(round, f"StaleEpoch: a round {record.round} has paused this rank")  # E5
        record.round = round
        if record.state is EngineState.SERVING:
            if (error := self._do(lambda: self._callbacks.pause(in_flight))) is not None:
                return self._fail(round, f"PauseTimeout: {error}")
            self._become(EngineState.QUIET)
        self._answer("paused", round)

    def _commit(self, round: Round, version: Version, kv_cache: KvCache, extras: Any) -> None:
        record, staging = self._record, self._staging
        clean = record.state in (EngineState.QUIET, EngineState.APPLIED)
        if round < record.round:
            return self._fail(round, f"StaleEpoch: a round {record.round} has paused this rank")  # E5
        if record.state is EngineState.SERVING:
            return self._fail(round, "EngineRefused: the rank is not paused")  # E4
        if clean and record.live is not None and version.is_older_than(record.live):
            return self._fail(round, f"VersionRegressed: step {version.step} is older than {record.live.step}")  # E4
        record.round, record.live = round, None
        self._become(EngineState.DIRTY)  # E2
        if staging is None:
            return self._fail(round, "ApplyFailed: no staging was shown")
        caches: list[str] = []

        def take() -> Any:
            return self._callbacks.apply(staging)

        def empty() -> Any:
            return self._callbacks.commit(version, kv_cache, extras)

        staging.begin(lambda group: self._tell_applied(round, group))
        error = self._do(take)
        if self._groups and staging.applying is not None:
            return self._fail(round, f"ApplyFailed: group `{staging.applying}`: {error or 'it was not applied'}")
        error = error or self._do(empty, caches.extend)
        if error is not None:
            return self._fail(round, f"ApplyFailed: {error}")
        record.live = version
        self._become(EngineState.APPLIED)
        self._answer("committed", round, cachesInvalidated=caches)

    def _resume(self, round: Round, version: Version) -> None:
        record = self._record
        held = record.state in (EngineState.QUIET, EngineState.APPLIED, EngineState.SERVING)
        if round < record.round or record.live != version or not held:
            return self._fail(round, f"EngineRefused: the rank is {record.state.value} and holds {record.live}")  # E3, E5
        if not self._serve():
            return self._fail(round, "EngineRefused: the engine did not resume")
        self._answer("resumed", round)

    def _serve_if_quiet(self) -> None:
        if self._record.state is EngineState.QUIET:
            self._serve()  # E3

    def _serve(self) -> bool:
        record = self._record
        if record.state is not EngineState.SERVING:
            live = record.live
            assert live is not None
            if self._do(lambda: self._callbacks.resume(live)) is not None:
                return False
            self._become(EngineState.SERVING)
        return True

    def _become(self, state: EngineState) -> None:
        assert self._session is not None
        with self._session.changed:
            self._record.state = state
            self._session.changed.notify_all()

    def _do(self, callback: Callable[[], Any], take: Callable[[Sequence[str]], None] | None = None) -> BaseException | None:
        """Runs a callback to its end; what it raises is an answer."""
        try:
            result = callback()
            if isinstance(result, Awaitable):
                result = self._await(result)
            if take is not None:
                take([str(name) for name in result or ()])
        except Exception as error:
            logger.exception("%s: a callback failed", self.seat)
            return error
        return None

    def _await(self, awaitable: Any) -> Any:
        import asyncio

        if self._loop is None:
            awaitable.close()
            raise Misuse("Unsupported", "callbacks are coroutines and `Engine` was given no `loop`", rank=self.seat)
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result()

    def _tell_applied(self, round: Round, group: int) -> None:
        session = self._session
        assert session is not None
        if self._groups:
            # An engine may apply on a thread of its own.
            with session.changed:
                session.send({"type": "applied", "round": round.json(), "group": group})

    def _answer(self, kind: str, round: Round, **more: Any) -> None:
        assert self._session is not None
        # Where it cannot be sent, the next hello carries the record.
        self._session.send({"type": kind, "round": round.json(), "record": self._record.json(), **more})

    def _fail(self, round: Round, message: str) -> None:
        logger.warning("%s: %s", self.seat, message)
        self._answer("failed", round, message=message)


def _extras(frame: Frame) -> Any:
    if "extras" not in frame:
        return None
    try:
        return json.loads(field(frame, "extras", str))
    except (ValueError, RecursionError) as error:
        raise ProtocolError("Unsupported", f"frame `commit` has extras that are no JSON: {error}") from error


def _pages(tensors: Mapping[str, Tensor], groups: Sequence[Group]) -> list[tuple[Frame, list[int]]]:
    """Pages of whole groups; without groups, of tensors in their order."""
    if not groups:
        every = list(tensors.values())
        pages = [(every[at : at + PAGE_TENSORS], []) for at in range(0, len(every), PAGE_TENSORS)] or [([], [])]
    else:
        pages = [([], [])]
        for group in groups:
            if pages[-1][0] and len(pages[-1][0]) + len(group.tensors) > PAGE_TENSORS:
                pages.append(([], []))
            pages[-1][0].extend(tensors[name] for name in group.tensors)
            pages[-1][1].append({"name": group.name, "class": group.kind.value, "tensors": len(group.tensors)})
    return [(_page((number, len(pages)), *page), []) for number, page in enumerate(pages)]


def _page(place: tuple[int, int], tensors: list[Tensor], groups: list[Frame]) -> Frame:
    number, pages = place
    described = [_described(tensor) for tensor in tensors]
    frame = {"type": "register", "page": number, "pages": pages, "memories": [], "tensors": described}
    return frame | {"groups": groups} if groups else frame


def _described(tensor: Tensor) -> Frame:
    frame: Frame = {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape}
    if tensor.pieces is not None:
        frame["pieces"] = [piece.json() for piece in tensor.pieces]
    return frame
