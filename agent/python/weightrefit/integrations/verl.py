"""verl: the checkpoint engine `weightrefit`, which publishes every rank's own shards, and the manager that asks for it.

Three settings of `actor_rollout_ref.rollout` bring both into verl::

    checkpoint_manager_class: weightrefit.integrations.verl.WeightrefitManager
    checkpoint_engine:
      backend: weightrefit
      custom_backend_module: weightrefit.integrations.verl

verl's own manager hands a checkpoint engine tensors that it gathers one by one; ours asks for the training engine, as
verl does for its `delta_sharded` backend, and no full tensor is made. docs/verl.md has the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.utils.ray_utils import auto_await

from ..errors import Misuse
from .engines import Engines, Options
from .ranks import TrainingRank, scalars

BACKEND = "weightrefit"

# The mode of verl's actor workers in which a checkpoint engine is handed the training engine.
_WITH_ENGINE = "delta_sharded"


def _needs_manager(what: str) -> Misuse:
    remedy = f"Set actor_rollout_ref.rollout.checkpoint_manager_class to {__name__}.WeightrefitManager."
    return Misuse("Unsupported", f"{what}: verl's own checkpoint manager is in charge", remedy=remedy)


@CheckpointEngineRegistry.register(BACKEND)
class WeightrefitCheckpointEngine(CheckpointEngine):
    """In each actor worker: one training rank. Rollout workers have one too, and it does nothing: an engine's ranks get
    their weights from their agents.

    Nothing has to be built before a step, so what verl calls a process group is empty.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, **options: Any):
        """Does nothing yet.

        Args:
            bucket_size: verl's; nothing is bucketed here.
            is_master: verl's: rank 0.
            options: of `Options`, from `checkpoint_engine.engine_kwargs.weightrefit`.
        """
        self._options = Options(**options)
        self._rank: TrainingRank | None = None
        self._step: int | None = None

    def training_rank(self, engine: Any) -> TrainingRank:
        """What this process publishes of verl's training engine, once: its shard export. For a training engine whose
        shards are other than DTensors, subclass this, override it, and register the subclass."""
        import torch

        from .. import pytorch
        from .verl_shards import ExportedShards

        return TrainingRank(torch.distributed.get_rank(), pytorch.world_token(), ExportedShards(engine))

    def prepare(self) -> dict[str, Any]:
        """Nothing to tell."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """No arguments for anybody: agents know who needs what of whom."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """Nothing to build."""

    def finalize(self) -> None:
        """Nothing to free: the next step is copied to the same memory."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publishes what the training engine holds, and returns when the step has ended here.

        Args:
            weights: verl's training engine.
            global_steps: the step; `None` is the last one again. A step that was refitted already is not published
                again, since verl names one state of the weights by it.

        Returns:
            On rank 0 numbers for verl's logger, on the others nothing.

        Raises:
            Misuse: `weights` are tensors.
            RefitFailed: not all engines serve the step; on rank 0.
        """
        if not hasattr(weights, "get_per_tensor_param_shard"):
            raise _needs_manager("gathered tensors were handed over instead of the training engine")
        step = (self._step or 0) if global_steps is None else global_steps
        if step == self._step:
            return {}
        options = self._options
        if self._rank is None:
            rank = self.training_rank(weights)
            await asyncio.to_thread(rank.register, options.timeout)
            self._rank = rank
        self._rank.publish(step, options.timeout)
        report = await asyncio.to_thread(self._rank.ended, step, options.wait, options.timeout)
        self._step = step
        return scalars(report) if report is not None else {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Any], None]:
        """Never asked for by our manager.

        Raises:
            Misuse: always.
        """
        raise _needs_manager("a rollout worker was asked to receive tensors")
        yield  # verl iterates over what this returns


class WeightrefitManager(CheckpointEngineManager):
    """Refits the rollout replicas: registers their engines at the first step, and leaves pausing to weightrefit.

    verl's manager would abort all requests and free the key-value cache first, for the time of the whole transfer.
    """

    def __init__(self, config: Any, actor_wg: Any, replicas: Sequence[Any]):
        """As verl's.

        Args:
            config: verl's `checkpoint_engine`.
            actor_wg: the training side.
            replicas: the rollout side, vLLM engines on GPUs of their own.
        """
        super().__init__(config, actor_wg, replicas)
        self._engines = Engines("engine", Options(**config.engine_kwargs.get(config.backend, {})))

    @auto_await
    async def update_weights(self, global_steps: int | None = None) -> dict[str, float]:
        """Brings all replicas to what the actor workers hold.

        Args:
            global_steps: the step.

        Returns:
            Numbers for verl's logger.

        Raises:
            WeightrefitError: they do not all serve it.
        """
        await asyncio.to_thread(self._engines.start, [replica.servers[0] for replica in self.replicas])
        metrics: dict[str, float] = {}
        for sent in ray.get(self.actor_wg.update_weights(global_steps=global_steps, mode=_WITH_ENGINE)):
            metrics.update(sent)
        if global_steps is not None:
            servers = [server for replica in self.replicas for server in replica.servers]
            ray.get([server.set_global_steps.remote(global_steps) for server in servers])
        return metrics

    def remove_replicas(self, replicas: Sequence[Any]) -> None:
        """Not supported: a replica leaves the refit with its agent.

        Raises:
            Misuse: always.
        """
        raise Misuse("Unsupported", "replicas cannot be removed from a running refit", remedy="End the replica's agent and its engine.")
