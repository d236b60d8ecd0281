"""What an engine rank says of its live tensors. The record lives and dies with the tensors; agents ask for it."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from .wire import Frame, field


class Version(NamedTuple):
    """Which weights. `run` and `step` are for people; `origin` and `sum` make it unique.

    Attributes:
        run: grows when a trainer starts again from an older step.
        step: the trainer's step.
        origin: epoch in which the publication was taken.
        sum: content digest of the pool's tensors, 32 hexadecimal digits.
    """

    run: int
    step: int
    origin: int
    sum: str

    @classmethod
    def read(cls, frame: Frame) -> Version:
        """The `version` of a frame."""
        value = field(frame, "version", dict)
        return cls(field(value, "run", int), field(value, "step", int), field(value, "origin", int), field(value, "sum", str))

    def is_older_than(self, other: Version) -> bool:
        """The order of versions: run, then step, then origin."""
        return (self.run, self.step, self.origin) < (other.run, other.step, other.origin)


class Round(NamedTuple):
    """Key of a round; later ones are larger."""

    epoch: int = 0
    round: int = 0

    @classmethod
    def read(cls, frame: Frame) -> Round:
        """The `round` of a frame."""
        value = field(frame, "round", dict)
        return cls(field(value, "epoch", int), field(value, "round", int))

    def json(self) -> dict[str, int]:
        """As on the wire."""
        return {"epoch": self.epoch, "round": self.round}


class EngineState(Enum):
    """State of an engine rank."""

    COLD = "cold"
    """Just started: serves nothing, whatever checkpoint it has loaded."""
    SERVING = "serving"
    """Serves `live`."""
    QUIET = "quiet"
    """Stopped at a step boundary; `live` is intact."""
    APPLIED = "applied"
    """A new version is written entirely and not yet served."""
    DIRTY = "dirty"
    """Live tensors may be half written."""


class InFlight(Enum):
    """What becomes of requests that run when a rank pauses, as `commit.inFlight` of the resource says."""

    KEEP = "Keep"
    """They stop, and go on with the new weights."""
    DRAIN = "Drain"
    """They end first."""
    ABORT = "Abort"
    """They are aborted."""


class KvCache(Enum):
    """What becomes of keys and values that older weights made, as `commit.kvCache` of the resource says."""

    RESET = "Reset"
    """They are forgotten, those of kept requests too."""
    KEEP = "Keep"
    """They are used on."""
    SALT_BY_VERSION = "SaltByVersion"
    """Requests that run use theirs on; those that come later find none of them."""


class Record:
    """The record of one rank."""

    def __init__(self, instance: str):
        self.instance = instance
        self.live: Version | None = None
        self.state = EngineState.COLD
        self.round = Round()

    def json(self) -> dict[str, Any]:
        """As on the wire."""
        live = self.live and {"run": self.live.run, "step": self.live.step, "origin": self.live.origin, "sum": self.live.sum}
        return {"instance": self.instance, "live": live, "state": self.state.value, "round": self.round.json()}
