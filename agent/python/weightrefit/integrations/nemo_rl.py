"""NeMo RL: a `WeightSynchronizer` that refits vLLM engines from policy workers, shard to shard.

Between `setup` and training::

    policy_generation.weight_synchronizer = WeightrefitSynchronizer(policy, policy_generation)
    policy_generation.weight_synchronizer.init_communicator()

Policy and generation have their own GPUs; docs/nemo-rl.md has the settings.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import ray
from nemo_rl.weight_sync.interfaces import WeightSynchronizer

from ..errors import Misuse, WeightrefitError
from . import ranks
from .engines import Engines, Options, raise_first

# What NeMo RL calls the time of a refit in its metrics.
_TIMED = "prepare_for_generation/transfer_and_update_weights"


class WeightrefitSynchronizer(WeightSynchronizer):
    """Publishes what the policy workers hold, and returns when the engines serve it.

    It moves weights only: what NeMo RL does around a refit of engines on GPUs of their own stays NeMo RL's. An engine
    is paused by weightrefit, for its own commit alone.
    """

    def __init__(self, policy: Any, generation: Any, *, rank: Callable[[Any], ranks.TrainingRank] = ranks.of_model, **options: Any):
        """Does nothing yet.

        Args:
            policy: NeMo RL's policy.
            generation: its vLLM generation, with `vllm_cfg.async_engine`.
            rank: run in each policy worker, once: what that worker publishes; by default the shards of its `model`, which
                is what workers of the DTensor backend hold.
            options: of `Options`: pool, replica, wait, timeout.
        """
        self._policy, self._generation, self._rank = policy, generation, rank
        self._options = Options(**options)
        self._engines = Engines("llm", self._options)
        self._step = 0
        self._stale = True

    def init_communicator(self) -> None:
        """Registers all engines, then all policy workers. Every agent of the refit must run.

        Raises:
            RuntimeError: one does not fit, or nobody answers; its cause has code, rank and remedy.
        """
        workers = self._generation.worker_group.workers
        # Of the workers of one engine, the first owns it.
        owners = workers[:: len(workers) // self._generation.dp_size]
        try:
            self._engines.start(owners)
            self._on_policy(ranks.start, self._rank, self._options.timeout)
        except WeightrefitError as error:
            raise RuntimeError(str(error)) from error

    def sync_weights(self, *, timer: Any = None, kv_scales: dict[str, float] | None = None) -> dict[str, float]:
        """Refits the engines with what the policy workers hold now.

        Args:
            timer: NeMo RL's, or none.
            kv_scales: not supported: no frame of protocol 1 carries them.

        Returns:
            Bytes, replicas and the seconds of each phase, for NeMo RL's logger.

        Raises:
            RuntimeError: the engines do not all serve the weights; its cause has code, rank and remedy. An engine that
                was left out serves nothing, or what it served before.
        """
        self._stale = True
        try:
            if kv_scales:
                message = f"{len(kv_scales)} scales of an fp8 key-value cache were given, and a refit carries weights only"
                raise Misuse("Unsupported", message, remedy="Set vllm_cfg.kv_cache_dtype to auto.")
            self._step += 1
            with timer.time(_TIMED) if timer is not None else nullcontext():
                reports = self._on_policy(ranks.refit, self._step, self._options.wait, self._options.timeout)
        except WeightrefitError as error:
            raise RuntimeError(str(error)) from error
        self._stale = False
        return ranks.scalars(next(report for report in reports if report is not None))

    @property
    def is_stale(self) -> bool:
        """Whether the engines may serve other weights than the policy had at the last `sync_weights`."""
        return self._stale

    def mark_stale(self) -> None:
        """The policy was trained. NeMo RL releases differ in whether they call this."""
        self._stale = True

    def shutdown(self) -> None:
        """Policy workers and engines leave the refit."""
        self._on_policy(ranks.end)
        self._engines.close()

    def _on_policy(self, run: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Runs it in every policy worker at once."""
        workers = self._policy.worker_group.workers
        results = ray.get([worker.__ray_call__.remote(run, *arguments) for worker in workers])
        raise_first(results)
        return results
