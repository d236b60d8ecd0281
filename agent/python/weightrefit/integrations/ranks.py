"""A training rank as a framework drives it: told a step, it returns when that step has ended."""

from __future__ import annotations

from typing import Protocol, Sequence

from ..driver import Refit
from ..errors import Misuse
from ..memory import Placed
from ..report import Report
from ..session import SOCKET_VARIABLE
from ..trainer import Trainer


class Snapshots(Protocol):
    """A rank's tensors in shared memory; `weightrefit.pytorch.Shards` is one."""

    placed: Sequence[Placed]

    def snapshot(self) -> int:
        """Copies what the rank holds now to where it is placed, and returns the bytes copied."""


class TrainingRank:
    """Publishes snapshots of one rank. Rank 0's agent leads, so rank 0 also learns how a step ended.

    Attributes:
        seat: `training/RANK`.
    """

    def __init__(self, rank: int, world: str, shards: Snapshots, *, socket: str | None = None):
        """Starts to connect.

        Args:
            rank: which training rank this process is.
            world: the token of `Trainer`.
            shards: what this rank publishes.
            socket: the agent's socket; by default that of `WEIGHTREFIT_SOCKET`.

        Raises:
            Misuse: there is neither. A framework that was told to refit this way would serve old weights for ever.
        """
        self._shards = shards
        self._trainer = Trainer(rank, world, socket=socket)
        self.seat = self._trainer.seat
        if not self._trainer.enabled:
            raise Misuse(
                "NotConfigured",
                f"{SOCKET_VARIABLE} is not set in the process of this rank",
                rank=self.seat,
                remedy=f"Set {SOCKET_VARIABLE} to the agent's socket where the framework starts its workers.",
            )
        self._refit = Refit(socket=socket) if rank == 0 else None

    def register(self, timeout: float | None) -> None:
        """Shows the rank's tensors to its agent, as `Trainer.register`."""
        self._trainer.register(self._shards.placed, timeout)

    def publish(self, step: int) -> None:
        """Copies the weights and publishes the copy; on the thread that trains, which may then go on."""
        self._shards.snapshot()
        self._trainer.publish(step)

    def ended(self, step: int, *, wait: str, timeout: float) -> Report | None:
        """Waits until the published step has ended here: read on every rank, and on rank 0 refitted or not.

        Args:
            step: the published one.
            wait: which replicas must serve it, as in `Refit`.
            timeout: seconds.

        Raises:
            RefitFailed: fewer replicas serve it than `wait` asks for; on rank 0.
            PublishRefused: the step was not taken.
        """
        try:
            return self._refit.sync(step, wait=wait, timeout=timeout) if self._refit is not None else None
        finally:
            self._trainer.wait_released(timeout)

    def close(self) -> None:
        """Leaves the refit."""
        self._trainer.close()
        if self._refit is not None:
            self._refit.close()


def scalars(report: Report) -> dict[str, float]:
    """A report as the numbers that frameworks log; seconds and bytes."""
    numbers: dict[str, float] = {
        "weightrefit/bytes_received": float(report.bytes_received),
        "weightrefit/bytes_skipped": float(report.bytes_skipped),
        "weightrefit/replicas_serving": float(len(report.replicas) - len(report.left_out)),
    }
    for phase, milliseconds in report.phase_milliseconds.items():
        numbers[f"weightrefit/{phase}_seconds"] = milliseconds / 1000
    return numbers
