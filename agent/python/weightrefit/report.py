"""What a driver is told: how a step ended, and how an agent stands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .wire import field


class ReplicaReport(NamedTuple):
    """A replica's part of a round.

    Attributes:
        pool: its pool.
        replica: its name in the pool.
        outcome: `Committed`, `NotCommitted` (serves what it served), `Held` (paused until a later round), `Aborted`
            (was never authorised) or `Unknown`.
        reason: code of what went wrong; a committed replica with a reason does not serve yet.
        member: the rank to blame, where one is.
    """

    pool: str
    replica: str
    outcome: str
    reason: str | None
    member: str | None

    @property
    def serves(self) -> bool:
        """Whether it serves the round's version."""
        return self.outcome == "Committed" and self.reason is None


class Report(NamedTuple):
    """How a step ended, as far as it will.

    Attributes:
        run, step: the version.
        epoch, id: the round, by its membership and its number there.
        outcome: `Committed` where at least one replica took the version, else `Aborted`; `Disabled` where there is no
            agent to ask.
        reason: code of the first thing that went wrong, when none did.
        member: the rank to blame, where one is.
        phase_milliseconds: duration of each phase that ran: prepare, transfer, verify, pause, commit, resume.
        bytes_sent: by all sources.
        bytes_received: by all destinations.
        bytes_skipped: needed not move; received and skipped together are what was planned.
        replicas: all that took part, in the membership's order.
    """

    run: int
    step: int
    epoch: int
    id: int
    outcome: str
    reason: str | None = None
    member: str | None = None
    phase_milliseconds: Mapping[str, int] = {}  # one for all, only read: a proxy of it could not be pickled
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_skipped: int = 0
    replicas: tuple[ReplicaReport, ...] = ()

    @property
    def left_out(self) -> tuple[ReplicaReport, ...]:
        """Replicas that took part and do not serve the version."""
        return tuple(replica for replica in self.replicas if not replica.serves)

    @classmethod
    def disabled(cls, step: int) -> Report:
        """Of a program that runs without weightrefit."""
        return cls(run=0, step=step, epoch=0, id=0, outcome="Disabled")

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Report:
        """From the `report` of a frame."""
        version, nbytes = field(value, "version", dict), field(value, "bytes", dict)
        return cls(
            run=field(version, "run", int),
            step=field(version, "step", int),
            epoch=field(value, "epoch", int),
            id=field(value, "id", int),
            outcome=field(value, "outcome", str),
            reason=value.get("reason"),
            member=value.get("member"),
            phase_milliseconds=dict(field(value, "phaseMilliseconds", dict)),
            bytes_sent=field(nbytes, "sent", int),
            bytes_received=field(nbytes, "received", int),
            bytes_skipped=field(nbytes, "skipped", int),
            replicas=tuple(map(_replica, field(value, "replicas", list))),
        )


def _replica(value: Any) -> ReplicaReport:
    value = value if isinstance(value, dict) else {}
    pool, replica, outcome = (field(value, name, str) for name in ("pool", "replica", "outcome"))
    return ReplicaReport(pool, replica, outcome, value.get("reason"), value.get("member"))


class RankStatus(NamedTuple):
    """One rank that the agent hosts.

    Attributes:
        seat: `training/RANK` or `inference/POOL/REPLICA/RANK`.
        registered: whether a client owns it and fits its layout.
        state: of an engine, as in `EngineState`; `None` without one.
        live_step: step that an engine's live tensors hold.
        published_step: newest step that a trainer published.
    """

    seat: str
    registered: bool
    state: str | None
    live_step: int | None
    published_step: int | None


class Status(NamedTuple):
    """How an agent stands.

    Attributes:
        epoch: number of its membership, `None` before the first.
        leader: seat whose agent drives rounds.
        ranks: those that it hosts.
        last_round: the last round that it led.
    """

    epoch: int | None
    leader: str | None
    ranks: tuple[RankStatus, ...]
    last_round: Report | None

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> Status:
        """From the `status` of a frame."""
        last = value.get("lastRound")
        ranks = tuple(map(_rank, field(value, "ranks", list)))
        return cls(value.get("epoch"), value.get("leader"), ranks, Report.read(last) if last else None)


def _rank(value: Any) -> RankStatus:
    value = value if isinstance(value, dict) else {}
    engine = value.get("engine") or {}
    return RankStatus(
        seat=field(value, "seat", str),
        registered=field(value, "registered", bool),
        state=engine.get("state"),
        live_step=(engine.get("live") or {}).get("step"),
        published_step=value.get("publishedStep"),
    )
