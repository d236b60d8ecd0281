"""The vLLM engines of a framework, each in a Ray actor that keeps it in an attribute.

What has to run beside an engine is sent there by `__ray_call__`, which every Ray actor has: no framework needs a worker
class of its own for it. Ray runs it on another thread than the actor's event loop, on which the engine lives.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from ..errors import DeadlineExceeded, Misuse, WeightrefitError
from ..vllm import Controller
from .ranks import without_agent

# Seconds between two looks at engines that start: recording takes milliseconds, starting an agent seconds.
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Options:
    """What a framework's settings say of refits.

    Attributes:
        pool: of the refit, as in the resource.
        replica: name of an engine in its pool, of which `{pool}` and `{number}`, from 0, are filled in; by default as
            `weightrefit coordinate` names them.
        wait: which replicas must serve a step, as in `Refit`.
        timeout: seconds for one step, and for each side to register.
    """

    pool: str = "default"
    replica: str = "{pool}-{number}"
    wait: str = "all"
    timeout: float = 300.0


@dataclass(frozen=True)
class _Started:
    """What runs beside an engine: its controller, and what becomes of its registration."""

    controller: Controller
    registered: Future[None]
    loop: asyncio.AbstractEventLoop


class Engines:
    """All engines, as the driver of the framework sees them."""

    def __init__(self, attribute: str, options: Options):
        """Does nothing yet.

        Args:
            attribute: of an actor, where it keeps its `AsyncLLM`.
            options: of the refit.
        """
        self._attribute, self._options = attribute, options
        self._actors: list[Any] = []

    def start(self, actors: Sequence[Any]) -> None:
        """Registers engines that are not yet, and waits until their agents have taken them.

        Args:
            actors: one per engine, in the order of their numbers; those of earlier calls come first.

        Raises:
            WeightrefitError: an engine cannot take part, with its rank; all the others are left as they are.
            DeadlineExceeded: not all were taken in time.
        """
        import ray

        options = self._options
        new = list(actors)[len(self._actors) :]
        names = [options.replica.format(pool=options.pool, number=len(self._actors) + number) for number in range(len(new))]
        states = ray.get([actor.__ray_call__.remote(_start, self._attribute, options, name) for actor, name in zip(new, names)])
        end = time.monotonic() + options.timeout
        while True:
            raise_first(states)
            waiting = [name for name, state in zip(names, states) if not state]
            if not waiting:
                break
            if time.monotonic() > end:
                message = f"replicas {', '.join(waiting)} of pool {options.pool} were not registered within {options.timeout:g} s"
                raise DeadlineExceeded("NotConfigured", message)
            time.sleep(_LOOK_SECONDS)
            states = ray.get([actor.__ray_call__.remote(_state) for actor in new])
        self._actors += new

    def close(self) -> None:
        """The engines leave the refit."""
        import ray

        ray.get([actor.__ray_call__.remote(_close) for actor in self._actors])
        self._actors = []


def raise_first(results: Iterable[Any]) -> None:
    """Raises the first error among what actors returned."""
    for result in results:
        if isinstance(result, WeightrefitError):
            raise result


def _start(actor: Any, attribute: str, options: Options, replica: str) -> bool | WeightrefitError:
    """Beside an engine. As `_state`."""
    engine = getattr(actor, attribute)
    # Runs since the engine was made on an event loop, and only of an engine that can be paused.
    handler = getattr(engine, "output_handler", None)
    if handler is None:
        message = f"replica {replica} is a {type(engine).__name__} without an event loop, which cannot be paused while it has requests"
        return Misuse("Unsupported", message, remedy="Use vLLM's asynchronous engine.")
    if not isinstance(getattr(actor, "weightrefit", None), _Started) or isinstance(_state(actor), WeightrefitError):
        controller = Controller(engine, pool=options.pool, replica=replica)
        if not controller.enabled:
            return without_agent(f"inference/{options.pool}/{replica}")
        loop = handler.get_loop()
        actor.weightrefit = _Started(controller, asyncio.run_coroutine_threadsafe(controller.start(timeout=None), loop), loop)
    return _state(actor)


def _state(actor: Any) -> bool | WeightrefitError:
    """Whether the engine is registered, or why it never will be."""
    registered = actor.weightrefit.registered
    if not registered.done():
        return False
    error = registered.exception()
    if error is None or isinstance(error, WeightrefitError):
        return error or True
    return WeightrefitError("EngineRefused", f"{type(error).__name__}: {error}")


def _close(actor: Any) -> None:
    """Beside an engine."""
    started, actor.weightrefit = actor.weightrefit, None
    asyncio.run_coroutine_threadsafe(started.controller.close(), started.loop).result()
