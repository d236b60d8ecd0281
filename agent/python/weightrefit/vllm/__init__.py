"""vLLM: a weight-transfer backend that takes what the agent has staged, and what pauses and resumes the engine for it.

In every vLLM process the entry point `vllm.general_plugins` registers the backend `weightrefit`. The program that owns
the engine adds::

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(..., weight_transfer_config=WeightTransferConfig(backend="weightrefit")))
    async with weightrefit.vllm.Controller(engine, pool="default", replica="a"):
        ...                                     # requests, as ever

Nothing here imports vLLM or torch before it is used.
"""

from __future__ import annotations

from .controller import Controller

BACKEND = "weightrefit"


def register() -> None:
    """What vLLM calls in each of its processes, several times perhaps."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "weightrefit.vllm.backend", "WeightrefitBackend")


__all__ = ["BACKEND", "Controller", "register"]
