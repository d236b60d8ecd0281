"""One client's connection to its agent: made on a thread of its own, and made anew whenever it ends.

Invariants:
* S1: nothing that the agent sends is handled by two threads at once, and nothing of a connection after its end.
* S2: who waits hears of a refusal, of an agent that is absent for too long, and of `close`; no wait is for ever.
* S3: `lock` guards this object and its owner; no callback of a user runs under it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, TypeVar

from .codes import REMEDIES
from .errors import AgentUnreachable, Closed, DeadlineExceeded, ProtocolError, Refused, WeightrefitError
from .wire import PROTOCOL, Connection, Frame, field

logger = logging.getLogger("weightrefit")

# Where the agent's socket is.
SOCKET_VARIABLE = "WEIGHTREFIT_SOCKET"

# Seconds without an agent after which waiting calls end: an agent restarts within a second or so, its pod within
# this.
ABSENCE_SECONDS = 60.0

# Seconds between two attempts to connect.
RETRY_SECONDS = 0.05

_told_disabled = False

_Own = TypeVar("_Own", bound="Connected")


def socket_path(given: str | None) -> str | None:
    """The socket that was named, or that of the environment. `None` means to do nothing, which is said once."""
    global _told_disabled
    path = given or os.environ.get(SOCKET_VARIABLE)
    if not path and not _told_disabled:
        _told_disabled = True
        logger.warning("%s is not set: weightrefit does nothing in this process", SOCKET_VARIABLE)
    return path or None


def draw_instance() -> str:
    """A name of this process that no other has."""
    return os.urandom(16).hex()


class Session:
    """Keeps one client connected.

    Attributes:
        changed: is notified of every change; its lock is the session's.
        registered: the agent has taken the registration of the present connection.
    """

    def __init__(
        self,
        path: str,
        *,
        name: str,
        rank: str | None,
        instance: str,
        absence: float,
        role: Callable[[], dict[str, Any]],
        pages: Iterable[tuple[Frame, list[int]]] = (),
        heard: Callable[[Frame, list[int]], None],
        joined: Callable[[], None] = lambda: None,
        lost: Callable[[], None] = lambda: None,
        failed: Callable[[WeightrefitError], None] = lambda error: None,
    ):
        """Does nothing before `start`.

        Args:
            path: the agent's socket.
            name: of the thread.
            rank: seat of the client, for messages.
            instance: 32 hexadecimal digits that name this process.
            absence: seconds without an agent after which waiting calls end.
            role: the `role` of the next `hello`; called under the lock.
            pages: the registration, sent on each connection; empty for a driver.
            heard: takes a frame and its descriptors, which are closed afterwards; on the session's thread.
            joined: hello and registration are sent; called under the lock.
            lost: the connection has ended, on the session's thread.
            failed: no agent for too long, or the end of the session; on the session's thread.
        """
        self.path = path
        self.rank = rank
        self.changed = threading.Condition(threading.RLock())
        self.registered = False
        self._instance = instance
        self._absence = absence
        self._role, self._pages = role, list(pages)
        self._heard, self._joined, self._lost, self._failed = heard, joined, lost, failed
        self._connection: Connection | None = None
        self._said_hello = self._welcomed = False
        self._missed_since = time.monotonic()
        self._end: WeightrefitError | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts to connect: after the owner has stored this, since its callbacks use it."""
        self._thread.start()

    def send(self, frame: Frame) -> bool:
        """Sends where there is a connection. False, and nothing happens, where there is none: its successor begins
        with what the agent must know. Under the lock, except from the session's thread."""
        connection = self._connection
        if connection is None or not self._said_hello:
            return False
        try:
            connection.send(frame)
        except OSError:
            return False  # the session's thread sees the end too
        return True

    def wait(self, done: Callable[[], bool], timeout: float | None, what: str, code: str) -> None:
        """Waits, with the lock held by nobody, until `done` holds; it is called under the lock.

        Args:
            timeout: seconds; `None` waits as long as there is an agent.
            what: what did not happen, for the message.
            code: of the exception when time is over.

        Raises:
            WeightrefitError: the session's end, an absent agent, or the timeout.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.changed:
            while not done():
                problem = self._end or self.absence()
                if problem is not None:
                    raise problem.with_traceback(None)
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    message = f"{what} within {timeout:g} s; {self._standing()}"
                    raise DeadlineExceeded(code, message, rank=self.rank)
                limits = [] if deadline is None else [deadline]
                if self._connection is None:
                    limits.append(self._missed_since + self._absence)
                self.changed.wait(max(min(limits) - now, 0.001) if limits else None)

    def absence(self) -> AgentUnreachable | None:
        """Set while no agent has answered for too long. Under the lock."""
        if self._connection is not None or time.monotonic() < self._missed_since + self._absence:
            return None
        remedy = f"Start the agent of this pod with `--socket {self.path}`, or correct {SOCKET_VARIABLE}."
        message = f"no agent has answered at {self.path} for {self._absence:g} s"
        return AgentUnreachable("PeerLost", message, rank=self.rank, remedy=remedy)

    @property
    def end(self) -> WeightrefitError | None:
        """Why the session has ended, if it has."""
        return self._end

    def pause(self, seconds: float) -> None:
        """Waits on the session's thread; ends early when the session is closed."""
        self._closing.wait(seconds)

    def close(self) -> None:
        """Ends the connection and, unless it is the caller, the thread. Waiting calls raise `Closed`."""
        self._finish(Closed("Cancelled", "the client was closed", rank=self.rank))
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _finish(self, end: WeightrefitError) -> None:
        with self.changed:
            self._end = self._end or end
            self._closing.set()
            if self._connection is not None:
                self._connection.end()
            self.changed.notify_all()

    def _standing(self) -> str:
        if self._connection is None:
            return f"no agent answers at {self.path}"
        if not self._welcomed:
            return f"the agent at {self.path} has not said welcome"
        if self._pages and not self.registered:
            return "the agent waits for a membership that has this rank"
        return "the agent is connected"

    def _run(self) -> None:
        while (connection := self._connect()) is not None:
            try:
                self._converse(connection)
            except ProtocolError as error:
                logger.error("%s", error)
                self._finish(error)
            except OSError as error:
                logger.info("connection to the agent at %s broke: %s", self.path, error)
            except Exception as error:
                # Without this thread nobody would hear anything any more, and never be told so.
                logger.exception("client of the agent at %s failed", self.path)
                self._finish(ProtocolError("Unsupported", f"client failed: {error!r}", rank=self.rank))
            finally:
                with self.changed:
                    self._connection = None
                    self._said_hello = self._welcomed = self.registered = False
                    self._missed_since = time.monotonic()
                    self.changed.notify_all()
                connection.close()
            self._lost()
        assert self._end is not None
        self._failed(self._end)

    def _connect(self) -> Connection | None:
        told = False
        while not self._closing.is_set():
            try:
                return Connection(self.path)
            except OSError as error:
                with self.changed:
                    absent = self.absence()
                    if absent is not None:
                        self.changed.notify_all()
                if absent is not None and not told:
                    told = True
                    logger.warning("%s (%s)", absent.message, error)
                    self._failed(absent)
            self._closing.wait(RETRY_SECONDS)
        return None

    def _converse(self, connection: Connection) -> None:
        with self.changed:
            if self._end is not None:
                return
            self._connection = connection
            hello = {"type": "hello", "protocol": PROTOCOL, "instance": self._instance, "role": self._role()}
        connection.send(hello)
        for page, fds in self._pages:
            connection.send(page, fds)
        with self.changed:
            self._said_hello = True
            self._joined()
        while (received := connection.receive()) is not None:
            frame, fds = received
            try:
                self._take(frame, fds)
            finally:
                for fd in fds:
                    os.close(fd)

    def _take(self, frame: Frame, fds: list[int]) -> None:
        kind = frame["type"]
        if kind == "welcome":
            if field(frame, "protocol", int) != PROTOCOL:
                raise ProtocolError("Unsupported", f"agent speaks protocol {frame['protocol']}, this client {PROTOCOL}")
            self._welcomed = True
        elif kind == "error" and frame.get("request") is None:
            self._refused(frame)
        elif self._end is None:
            if kind == "registered":
                with self.changed:
                    self.registered = True
                    self.changed.notify_all()
            self._heard(frame, fds)

    def _refused(self, frame: Frame) -> None:
        code, message = field(frame, "code", str), field(frame, "message", str)
        refusal = Refused(code, message, rank=self.rank, remedy=frame.get("hint") or REMEDIES.get(code))
        if self.registered:
            # A changed layout, most likely: the next connection registers again, and that decides.
            logger.warning("the agent ended the connection: %s", refusal)
            return
        logger.error("the agent refused this client: %s", refusal)
        self._finish(refusal)


class Connected:
    """What talks to the agent in one session. A context manager: `close` at its end."""

    def __init__(self, socket: str | None):
        self._path = socket_path(socket)
        self._session: Session | None = None

    @property
    def enabled(self) -> bool:
        """Whether there is an agent to talk to."""
        return self._path is not None

    def close(self) -> None:
        """Ends the connection; calls that wait raise `Closed`."""
        if self._session is not None:
            self._session.close()

    def _register(self, session: Session, timeout: float | None) -> None:
        """Starts the session and waits until the agent has taken its tensors."""
        self._session = session
        session.start()
        try:
            session.wait(lambda: session.registered, timeout, "no registration", "NotConfigured")
        except WeightrefitError:
            session.close()
            self._session = None  # whoever corrects it may register again
            raise

    def __enter__(self: _Own) -> _Own:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
