# Made by agent/python/tests/signatures/write.py from
# NVIDIA-NeMo/RL, nemo_rl/weight_sync/interfaces.py, commit 00fa128513dc55e13201ad0f90f17876fe5f97f4
from __future__ import annotations

from abc import ABC, abstractmethod


class WeightSynchronizer(ABC):

    @abstractmethod
    def sync_weights(self, *, timer: Optional[Timer]=None, kv_scales: Optional[dict[str, float]]=None) -> Optional[dict[str, float]]:
        ...

    @property
    @abstractmethod
    def is_stale(self) -> bool:
        ...

    @abstractmethod
    def mark_stale(self) -> None:
        ...

    @abstractmethod
    def init_communicator(self) -> None:
        ...

    @abstractmethod
    def shutdown(self) -> None:
        ...
