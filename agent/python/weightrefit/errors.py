"""Everything that this package raises, as one tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .codes import REMEDIES

if TYPE_CHECKING:
    from .report import Report


class WeightrefitError(Exception):
    """Something could not be done.

    Attributes:
        code: stable name, the same as in conditions, metrics and `weightrefit explain`.
        message: what happened, in one sentence.
        rank: the seat concerned, as `training/0` or `inference/POOL/REPLICA/RANK`; `None` where no one rank is.
        remedy: what a person can do about it.
    """

    def __init__(self, code: str, message: str, *, rank: str | None = None, remedy: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.rank = rank
        self.remedy = remedy or REMEDIES.get(code, "Look at the agent's log.")

    def __reduce__(self) -> tuple[Any, ...]:
        # What an exception keeps by itself is not what these are made from, and launchers pickle what a rank raises.
        return _again, (type(self), self.message, self.__dict__)

    def __str__(self) -> str:
        rank = f" ({self.rank})" if self.rank else ""
        return f"{self.code}{rank}: {self.message}\nhint: {self.remedy}"


class AgentUnreachable(WeightrefitError):
    """No agent has answered at the socket for longer than the client waits."""


class ProtocolError(WeightrefitError):
    """What came through the socket is no frame of protocol 1."""


class Refused(WeightrefitError):
    """The agent refused the client or a request of it."""


class PublishRefused(Refused):
    """A published step was not taken; its memory was never read and is the trainer's."""


class ExecutorFailed(WeightrefitError):
    """The executor in the rank's own process cannot start, or works no more."""


class RefitFailed(WeightrefitError):
    """The step ended, and fewer replicas serve it than were asked for.

    Attributes:
        report: how it ended.
    """

    def __init__(self, code: str, message: str, *, report: Report, rank: str | None = None):
        super().__init__(code, message, rank=rank)
        self.report = report


class DeadlineExceeded(WeightrefitError, TimeoutError):
    """Something did not happen within the timeout that the caller gave."""


class Misuse(WeightrefitError, ValueError):
    """The call cannot be meant: the program has to be corrected."""


class Closed(WeightrefitError):
    """The client was closed while something waited for it."""


def _again(kind: type[WeightrefitError], message: str, attributes: dict[str, Any]) -> WeightrefitError:
    """The error that another process raised."""
    error = kind.__new__(kind, message)
    error.__dict__.update(attributes)
    return error
