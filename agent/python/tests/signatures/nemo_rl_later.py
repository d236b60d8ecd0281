# Made by agent/python/tests/signatures/write.py from
# NVIDIA-NeMo/RL, nemo_rl/weight_sync/interfaces.py, git blob 19ef4f8af032bfd04e39c996d4438ed01c91567e
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
    def init_communicator(self) -> None:
        ...

    def reconcile_communicator(self, absent_shards: Sequence[int], force: bool=False) -> Optional[bool]:
        ...

    @abstractmethod
    def shutdown(self) -> None:
        ...
