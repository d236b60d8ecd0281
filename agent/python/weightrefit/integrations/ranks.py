"""A training rank as a framework drives it: told a step, it returns when that step has ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..driver import Refit
from ..errors import Misuse, PublishRefused, WeightrefitError
from ..memory import Placed
from ..report import Report
from ..session import SOCKET_VARIABLE
from ..trainer import Trainer

logger = logging.getLogger("weightrefit")


def without_agent(seat: str) -> Misuse:
    """A framework that was told to refit this way would serve old weights for ever, so here it is an error."""
    remedy = f"Set {SOCKET_VARIABLE} to the agent's socket where the framework starts its workers."
    return Misuse("NotConfigured", f"{SOCKET_VARIABLE} is not set in its process", rank=seat, remedy=remedy)


class Snapshots(Protocol):
    """A rank's tensors in shared memory; `weightrefit.pytorch.Shards` is one."""

    @property
    def placed(self) -> Sequence[Placed]:
        """All tensors of the rank, for `Trainer.register`."""

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
            Misuse: there is neither.
        """
        self._shards = shards
        self._trainer = Trainer(rank, world, socket=socket)
        self.seat = self._trainer.seat
        if not self._trainer.enabled:
            raise without_agent(self.seat)
        self._refit = Refit(socket=socket) if rank == 0 else None
        self._lent = False

    def register(self, timeout: float | None) -> None:
        """Shows the rank's tensors to its agent, as `Trainer.register`."""
        self._trainer.register(self._shards.placed, timeout)

    def publish(self, step: int, timeout: float) -> None:
        """Copies the weights and publishes the copy; on the thread that trains, which may then go on.

        Args:
            step: grows.
            timeout: seconds that an earlier step, whose end was not waited for, may take to be released.
        """
        if self._lent:
            self._release(timeout)
        self._shards.snapshot()
        self._trainer.publish(step)
        self._lent = True

    def ended(self, step: int, wait: str, timeout: float) -> Report | None:
        """Waits until the published step has ended here: read on every rank, and on rank 0 refitted or not.

        Args:
            step: the published one.
            wait: which replicas must serve it, as in `Refit`.
            timeout: seconds.

        Raises:
            RefitFailed: fewer replicas serve it than `wait` asks for; on rank 0.
            PublishRefused: the step was not taken.
            DeadlineExceeded: it has not ended in time.
        """
        report = self._refit.sync(step, wait=wait, timeout=timeout) if self._refit is not None else None
        self._trainer.wait_released(timeout)
        self._lent = False
        return report

    def _release(self, timeout: float) -> None:
        try:
            self._trainer.wait_released(timeout)
        except PublishRefused as refusal:
            # Whoever waited for that step was told of its end.
            logger.info("%s", refusal)

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


def of_model(worker: Any) -> TrainingRank:
    """A worker of a torch process group that keeps its module in `model`: it publishes the module's shards, as they are."""
    import torch

    from .. import pytorch

    return TrainingRank(torch.distributed.get_rank(), pytorch.world_token(), pytorch.Shards(worker.model))


# What `__ray_call__` runs in a worker. An error that is returned keeps its type, whatever Ray does with one that is raised.


def start(worker: Any, rank: Callable[[Any], TrainingRank], timeout: float) -> WeightrefitError | None:
    """Makes the worker a training rank."""
    try:
        worker.weightrefit = rank(worker)
        worker.weightrefit.register(timeout)
    except WeightrefitError as error:
        return error
    return None


def refit(worker: Any, step: int, wait: str, timeout: float) -> Report | WeightrefitError | None:
    """Publishes what the worker holds and waits for its end."""
    try:
        worker.weightrefit.publish(step, timeout)
        return worker.weightrefit.ended(step, wait, timeout)
    except WeightrefitError as error:
        return error


def end(worker: Any) -> None:
    """The worker leaves the refit, if it took part."""
    if (rank := getattr(worker, "weightrefit", None)) is not None:
        rank.close()
