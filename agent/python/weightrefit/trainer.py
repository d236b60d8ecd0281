"""A training rank: owns tensors in shared memory and publishes steps of them."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable
from enum import Enum
from typing import Any

from .codes import RETRIED
from .errors import Misuse, PublishRefused, WeightrefitError
from .executor import RankClient
from .memory import Placed
from .session import ABSENCE_SECONDS, RETRY_SECONDS, Session, draw_instance
from .wire import EXTRAS_BYTES_MAX, FRAME_FDS_MAX, Frame, choice, field

# Tensors of one registration page: well below a frame's 16 MiB at the longest names.
PAGE_TENSORS = 4096

# Longest world token.
WORLD_BYTES_MAX = 64


class Outcome(Enum):
    """How a publication ended."""

    READ = "Read"
    """A round read it."""
    DROPPED = "Dropped"
    """A newer step took its place, or ranks published different steps; it was not read."""
    WITHDRAWN = "Withdrawn"
    """Nobody asked for it in time."""
    DISABLED = "Disabled"
    """There is no agent to publish to."""


class Trainer(RankClient):
    """One training rank.

    Use it as a context manager, or call `close`::

        with Trainer(rank, world) as trainer:
            trainer.register(placed)
            for step in range(steps):
                train(placed)                   # writes placed[i].buffer
                trainer.publish(step)           # from here on the memory holds `step` and must not change
                trainer.wait_released()         # from here on it may

    After `close` the agent unmaps the memory, and a publication that is not released is withdrawn. Methods may be called
    from any thread.
    """

    def __init__(self, rank: int, world: str, *, socket: str | None = None, absence: float = ABSENCE_SECONDS):
        """Does nothing yet.

        Args:
            rank: which training rank this process is.
            world: a token that all ranks of one start of the trainer share and no other start has, 1 to 64 bytes:
                drawn by rank 0 and spread, or the launcher's run id with its restart count.
            socket: the agent's socket; by default that of `WEIGHTREFIT_SOCKET`.
            absence: seconds without an agent after which waiting calls raise `AgentUnreachable`.
        """
        super().__init__(socket)
        self.seat = f"training/{rank}"
        if rank < 0 or not 1 <= len(world.encode()) <= WORLD_BYTES_MAX:
            message = f"rank {rank} with a world token of {len(world.encode())} bytes, where 1 to {WORLD_BYTES_MAX} are possible"
            raise Misuse("Unsupported", message, rank=self.seat)
        self._rank, self._world, self._absence = rank, world, absence
        self._instance = draw_instance()
        # Keeps the registered memories alive.
        self._placed: list[Placed] = []
        # Step whose memory is not the trainer's, whether the agent of the present connection was told, and how the
        # last publication ended. Under the session's lock.
        self._outstanding: int | None = None
        self._extras: str | None = None
        self._offered = False
        self._ended: Outcome | WeightrefitError | None = None

    def register(self, placed: Iterable[Placed], timeout: float | None = 300.0) -> None:
        """Shows the rank's tensors to the agent, again after each reconnect, and waits until it has taken them.

        That takes a membership: all agents of the refit must be there.

        Args:
            placed: all tensors that the layout gives this rank, empty shards included. Their memory stays mapped by
                the agent until `close`.
            timeout: seconds; `None` waits as long as there is an agent.

        Raises:
            Refused: with `RegistrationMismatch` and the first five differences where the layout says otherwise.
            AgentUnreachable: no agent listens.
            DeadlineExceeded: the agent had no membership in time.
        """
        if self._path is None:
            return
        if self._session is not None:
            raise Misuse("RegistrationMismatch", "this trainer is registered already", rank=self.seat)
        self._placed = list(placed)
        session = Session(
            self._path,
            name=f"weightrefit {self.seat}",
            rank=self.seat,
            instance=self._instance,
            absence=self._absence,
            role=self._role,
            pages=_pages(self._placed),
            heard=self._heard,
            lost=self._lost,
        )
        self._register(session, timeout)

    def publish(self, step: int, extras: Any = None) -> None:
        """Promises that the registered memory holds `step` and stays as it is until `wait_released` returns.

        Returns at once. Where the agent is away, the step is published when it is back.

        Args:
            step: the trainer's step; grows in one world. All ranks publish the same steps.
            extras: what every engine is given with this step's `commit`, such as scales of a quantised cache: anything
                that JSON can say, of 64 KiB at most. Training rank 0 alone may give them.

        Raises:
            ExecutorFailed: with `AgentWedged` where this process must end (`start_executor`).
        """
        if self._path is None:
            return
        step = operator.index(step)
        self._check_executor()
        said = None if extras is None else self._say(extras)
        session = self._open()
        with session.changed:
            if self._outstanding is not None:
                message = f"step {self._outstanding} is not released, so its memory cannot hold step {step}"
                raise Misuse("SourceChanged", message, rank=self.seat)
            if session.end is not None:
                raise session.end
            self._outstanding, self._extras, self._ended = step, said, None
            self._offer(session)

    def wait_released(self, timeout: float | None = None) -> Outcome:
        """Waits until the memory of the published step is the trainer's again, and says how that came.

        Args:
            timeout: seconds; `None` waits as long as there is an agent. The refit's own timeouts bound a publication.

        Raises:
            PublishRefused: the step was not taken; the memory is the trainer's.
            AgentUnreachable: the agent is gone, and with it every mapping; the memory is the trainer's, and the step
                is not published again.
            DeadlineExceeded: the memory is still lent.
        """
        if self._path is None:
            return Outcome.DISABLED
        session = self._open()
        with session.changed:
            if self._outstanding is None and self._ended is None:
                raise Misuse("SourceGone", "nothing was published", rank=self.seat)
            step = self._outstanding
            try:
                session.wait(lambda: self._ended is not None, timeout, f"step {step} was not released", "TransferTimeout")
            except WeightrefitError:
                # The end of the stream is the agent's promise that it has unmapped everything.
                if session.end is not None or session.absence() is not None:
                    self._outstanding = None
                raise
            ended = self._ended
        assert ended is not None
        if isinstance(ended, WeightrefitError):
            raise ended
        return ended

    async def released(self, timeout: float | None = None) -> Outcome:
        """`wait_released` for asyncio."""
        import asyncio

        return await asyncio.to_thread(self.wait_released, timeout)

    def _open(self) -> Session:
        if self._session is None:
            raise Misuse("RegistrationMismatch", "call `register` first", rank=self.seat)
        return self._session

    def _say(self, extras: Any) -> str:
        if self._rank != 0:
            raise Misuse("Unsupported", "extras are training rank 0's to publish", rank=self.seat)
        try:
            said = json.dumps(extras, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise Misuse("Unsupported", f"extras are no JSON: {error}", rank=self.seat) from error
        if (nbytes := len(said.encode())) > EXTRAS_BYTES_MAX:
            raise Misuse("Unsupported", f"extras of {nbytes} bytes, where {EXTRAS_BYTES_MAX} are possible", rank=self.seat)
        return said

    def _role(self) -> Frame:
        return {"kind": "trainer", "rank": self._rank, "world": self._world, "outstanding": self._outstanding}

    def _offer(self, session: Session) -> None:
        """Tells the agent of the outstanding step, once a connection. Under the lock."""
        if self._outstanding is not None and session.registered and not self._offered:
            # Where it cannot be sent, the next connection offers it again.
            frame = {"type": "publish", "step": self._outstanding, "world": self._world}
            self._offered = session.send(frame if self._extras is None else frame | {"extras": self._extras})

    def _heard(self, frame: Frame, fds: list[int]) -> None:
        session, kind = self._open(), frame["type"]
        if kind == "registered":
            with session.changed:
                self._offer(session)
        elif kind == "released":
            self._settle(session, field(frame, "step", int), choice(frame, "outcome", Outcome))
        elif kind == "publishRefused":
            step, code = field(frame, "step", int), field(frame, "code", str)
            if code not in RETRIED:
                message, remedy = field(frame, "message", str), frame.get("hint")
                self._settle(session, step, PublishRefused(code, message, rank=self.seat, remedy=remedy))
                return
            session.pause(RETRY_SECONDS)
            with session.changed:
                self._offered = self._offered and step != self._outstanding
                self._offer(session)

    def _lost(self) -> None:
        session = self._open()
        with session.changed:
            self._offered = False

    def _settle(self, session: Session, step: int, ended: Outcome | WeightrefitError) -> None:
        with session.changed:
            if step == self._outstanding:
                self._outstanding, self._offered, self._ended = None, False, ended
                session.changed.notify_all()


def _pages(placed: list[Placed]) -> list[tuple[Frame, list[int]]]:
    """A registration, page by page; the descriptors of the memories that a page adds ride on it."""
    pages: list[tuple[Frame, list[int]]] = []
    numbers: dict[int, int] = {}
    tensors: list[Frame] = []
    memories: list[Frame] = []
    fds: list[int] = []

    def turn() -> None:
        nonlocal tensors, memories, fds
        pages.append(({"type": "register", "page": len(pages), "pages": 0, "memories": memories, "tensors": tensors}, fds))
        tensors, memories, fds = [], [], []

    for entry in placed:
        tensor, memory = entry.tensor, entry.memory
        new = id(memory) not in numbers
        if len(tensors) == PAGE_TENSORS or (new and len(fds) == FRAME_FDS_MAX):
            turn()
        if new:
            numbers[id(memory)] = len(numbers)
            memories.append(memory.frame)
            fds.append(memory.fd)
        at = {"memory": numbers[id(memory)], "offset": entry.offset}
        tensors.append({"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "at": at})
    turn()
    for page, _ in pages:
        page["pages"] = len(pages)
    return pages
