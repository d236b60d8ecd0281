"""The weight-transfer backend that vLLM runs in each worker: one rank of a replica.

Invariants:
* B1: nothing here raises into vLLM. Where a worker raises, its executor leaves the replies of the others queued, and the
  next call takes them for its own. What fails is told to the controller, and by the client to the agent.
* B2: only the worker's own thread touches the model: the client's thread waits while `receive_weights` applies.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from ..engine import Engine
from ..errors import Misuse, WeightrefitError
from ..memory import Staging
from ..record import InFlight, KvCache, Version
from .channel import RankChannel
from .checkpoint import tensors
from .live import LiveModel

logger = logging.getLogger("weightrefit")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """What the controller tells every rank.

    Attributes:
        controller: socket of the controller.
        pool, replica: which engine this is.
        agent: socket of the agent.
        checkpoint: directory whose safetensors files say which tensors the model has.
        cast: whether an engine may hold in another dtype what its checkpoint has in float32.
    """

    controller: str
    pool: str
    replica: str
    agent: str
    checkpoint: str
    cast: bool


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Nothing: what to apply came through the agent."""


class WeightrefitBackend(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker of an engine, and its agent's client."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False

    _rank: _Rank | None = None

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Records the model and registers it; how that went, the controller is told."""
        self.shutdown()
        number = self.parallel_config.rank
        try:
            channel = RankChannel(init_info.controller, number)
        except OSError as error:
            logger.error("rank %d cannot reach the controller at %s: %s", number, init_info.controller, error)
            return
        try:
            live = LiveModel(self.model, self.model_config, self.device)
            checkpoint = tensors(init_info.checkpoint)
            registered = live.record(checkpoint)
            if not init_info.cast:
                _same_precision(checkpoint, self.model_config.dtype)
            self._rank = _Rank(init_info, number, live, registered, channel)
        except Exception as error:
            logger.exception("this worker cannot take part")
            channel.refuse(error)

    def start_weight_update(self) -> None:
        """Nothing: a model that is in its load format cannot be put back by a worker that failed before it applied."""

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Applies what the agent staged."""
        if self._rank is not None:
            self._rank.take()

    def finish_weight_update(self) -> None:
        """Nothing: `receive_weights` leaves the model whole."""

    def shutdown(self) -> None:
        """Leaves the refit."""
        if self._rank is not None:
            self._rank.close()
            self._rank = None


class _Rank:
    """The agent's callbacks, on the client's thread."""

    def __init__(self, info: InitInfo, number: int, live: LiveModel, registered: list[Any], channel: RankChannel):
        self._live, self._channel = live, channel
        self._lock = threading.Lock()
        self._staging: Staging | None = None
        self._failed: Exception | None = None
        self._engine = Engine(info.pool, info.replica, number, registered, self, groups=live.groups, socket=info.agent)
        # Waiting for a membership must not keep the worker from its other calls.
        threading.Thread(target=self._register, name="weightrefit register", daemon=True).start()

    def close(self) -> None:
        self._engine.close()
        self._channel.close()

    def take(self) -> None:
        """On the worker's thread: applies the staging that the client's thread was given."""
        with self._lock:
            staging, self._staging = self._staging, None
        if staging is None:
            return
        try:
            self._live.begin()
            self._live.apply(staging)
            self._live.finish()
            torch.accelerator.synchronize()
            self._failed = None
        except Exception as error:
            logger.exception("the staged weights could not be applied")
            self._failed = error
            self._put_back()

    def _put_back(self) -> None:
        try:
            self._live.abort()
        except Exception:
            # The rank stays dirty and serves nothing either way.
            logger.exception("modules that were not applied could not be put back")

    def pause(self, in_flight: InFlight) -> None:
        self._channel.ask("pause", in_flight=in_flight.value)

    def apply(self, staging: Staging) -> None:
        with self._lock:
            self._staging, self._failed = staging, Misuse("ApplyFailed", "the worker was not told to apply")
        self._channel.ask("apply")
        if self._failed is not None:
            raise self._failed

    def commit(self, version: Version, kv_cache: KvCache, extras: Any) -> list[str]:
        of = {"run": version.run, "step": version.step, "kv_cache": kv_cache.value, "extras": extras}
        return self._channel.ask("commit", **of)["caches"]

    def resume(self, version: Version) -> None:
        self._channel.ask("resume", run=version.run, step=version.step)

    def _register(self) -> None:
        try:
            self._engine.register(timeout=None)
            explained = self._live.explained
            self._channel.tell("registered", tensors=len(self._live.tensors), explained=explained)
        except WeightrefitError as error:
            self._channel.refuse(error)


def _same_precision(checkpoint: list[Any], dtype: torch.dtype) -> None:
    single = next((tensor.name for tensor in checkpoint if tensor.dtype == "f32"), None)
    if single is None or dtype == torch.float32:
        return
    held = str(dtype).removeprefix("torch.")
    raise Misuse(
        "DtypeMismatch",
        f"the checkpoint has `{single}` in float32 and the engine holds it in {held}, as `dtype=auto` does unasked",
        remedy=f"Start the engine with dtype=float32, or say that {held} is meant: Controller(..., cast=True).",
    )
