"""What stands between vLLM and the ranks of its engine: pauses it when they have to be quiet, lets all of them apply in
one call of vLLM's, and resumes it when all of them serve.

Invariants:
* O1: the engine runs steps only while every rank serves. It is paused before the first rank registers, since a rank
  that has just started serves nothing.
* O2: ranks apply together or not at all: a rank that leaves or serves on ends the wait of the others.
* O3: no timer resumes anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import struct
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field as default
from types import TracebackType
from typing import Any

from ..errors import Misuse, Refused
from ..record import InFlight, KvCache
from ..session import socket_path
from ..wire import FRAME_BYTES_MAX, Frame, choice, decode, encode

logger = logging.getLogger("weightrefit")

# The refit's word for what becomes of requests in flight -> vLLM's.
_PAUSES = {InFlight.KEEP: "keep", InFlight.DRAIN: "wait", InFlight.ABORT: "abort"}


@dataclass
class _Seat:
    """One rank, as the controller knows it."""

    writer: asyncio.StreamWriter
    serves: bool = False
    applied: asyncio.Future[None] | None = None
    registered: asyncio.Future[dict[str, Any]] = default(default_factory=lambda: asyncio.get_running_loop().create_future())


class Controller:
    """One engine of a pool, from where its requests come. An async context manager.

    Attributes:
        explained: after `start`, tensors of the engine that no version changes, with the reason.
        version: `RUN.STEP` that the engine has applied last; vLLM knows it as `weight_version`.
    """

    def __init__(
        self,
        engine: Any,
        *,
        pool: str = "default",
        replica: str = "0",
        socket: str | None = None,
        checkpoint: str | None = None,
        cast: bool = False,
        extras: Callable[[Any], Awaitable[None]] | None = None,
    ):
        """Does nothing yet.

        Args:
            engine: vLLM's `AsyncLLM`, made with the weight-transfer backend `weightrefit`.
            pool: of the refit.
            replica: name of this engine in the pool.
            socket: the agent's; by default that of `WEIGHTREFIT_SOCKET`.
            checkpoint: directory whose safetensors files say which tensors the model has; by default the model's own.
            cast: let an engine hold a float32 checkpoint in its own, smaller dtype.
            extras: called with what training rank 0 published beside a version, while the engine is paused and holds
                that version; raising keeps it paused.
        """
        self._engine, self._pool, self._replica = engine, pool, replica
        self._agent = socket_path(socket)
        self._checkpoint, self._cast, self._take_extras = checkpoint, cast, extras
        self._seats: dict[int, _Seat] = {}
        self._present = asyncio.Condition()
        self._turn = asyncio.Lock()
        self._paused = self._stale = False
        self._salts: _Salts | None = None
        self._server: asyncio.Server | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self.explained: dict[str, str] = {}
        self.version: str | None = None

    @property
    def enabled(self) -> bool:
        """Whether there is an agent to talk to."""
        return self._agent is not None

    async def start(self, timeout: float | None = 300.0) -> None:
        """Pauses the engine and registers its ranks; it serves after the first version.

        Args:
            timeout: seconds until all ranks are registered, which takes all agents of the refit; `None` waits.

        Raises:
            Refused: a rank does not fit, with code, rank and reason.
            TimeoutError: not all ranks were registered in time.
        """
        if self._agent is None:
            return
        self._directory = tempfile.TemporaryDirectory(prefix="weightrefit-")
        path = os.path.join(self._directory.name, "controller.sock")
        self._server = await asyncio.start_unix_server(self._serve, path, limit=FRAME_BYTES_MAX)
        await self._pause(InFlight.KEEP)
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {
            "controller": path,
            "pool": self._pool,
            "replica": self._replica,
            "agent": self._agent,
            "checkpoint": self._checkpoint or self._engine.model_config.model,
            "cast": self._cast,
        }
        try:
            await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
            await asyncio.wait_for(self._all_registered(), timeout)
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Leaves the refit. An engine that is paused stays so."""
        if self._server is not None:
            self._server.close()
            await self._engine.shutdown_weight_transfer_engine() if hasattr(self._engine, "shutdown_weight_transfer_engine") else None
            for seat in self._seats.values():
                seat.writer.close()
            self._server = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    async def __aenter__(self) -> Controller:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def _ranks(self) -> int:
        return self._engine.vllm_config.parallel_config.world_size

    async def _all_registered(self) -> None:
        async with self._present:
            await self._present.wait_for(lambda: len(self._seats) == self._ranks)
            waiting = [seat.registered for seat in self._seats.values()]
        for told in await asyncio.gather(*waiting):
            self.explained.update(told["explained"])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One rank's frames, to its end."""
        rank = -1
        try:
            first = await _receive(reader)
            if first is None or first["type"] != "rank":
                return
            rank = first["rank"]
            seat = _Seat(writer)
            async with self._present:
                self._seats[rank] = seat
                self._present.notify_all()
            while (frame := await _receive(reader)) is not None:
                await self._hear(rank, seat, frame)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the worker is gone
        finally:
            if (gone := self._seats.get(rank)) is not None and gone.writer is writer:
                gone.serves = False
                self._fail_waiting(f"rank {rank} has left")
            writer.close()

    async def _hear(self, rank: int, seat: _Seat, frame: Frame) -> None:
        kind = frame["type"]
        if kind == "registered":
            if not seat.registered.done():
                seat.registered.set_result(frame)
        elif kind == "refused":
            refusal = Refused(frame["code"], frame["message"], rank=f"inference/{self._pool}/{self._replica}/{rank}", remedy=frame.get("remedy"))
            logger.error("%s", refusal)
            if not seat.registered.done():
                seat.registered.set_exception(refusal)
        else:
            tasks: dict[str, Callable[[int, _Seat, Frame], Awaitable[Frame]]] = {
                "pause": self._pause_rank,
                "apply": self._apply_rank,
                "commit": self._commit_rank,
                "resume": self._resume_rank,
            }
            try:
                answer = await tasks[kind](rank, seat, frame)
            except Exception as error:
                logger.exception("rank %d: `%s` failed", rank, kind)
                answer = {"type": "failed", "message": f"{kind}: {error}"}
            seat.writer.write(encode(answer))
            await seat.writer.drain()

    async def _pause_rank(self, rank: int, seat: _Seat, frame: Frame) -> Frame:
        seat.serves = False
        self._fail_waiting(f"rank {rank} has to pause")
        await self._pause(choice(frame, "in_flight", InFlight))
        return {"type": "done"}

    async def _apply_rank(self, rank: int, seat: _Seat, frame: Frame) -> Frame:
        if not self._paused:
            raise Misuse("EngineRefused", "the engine is not paused")
        seat.applied = applied = asyncio.get_running_loop().create_future()
        if len(self._seats) == self._ranks and all(other.applied for other in self._seats.values()):
            await self._apply()
        await applied
        return {"type": "done"}

    async def _commit_rank(self, rank: int, seat: _Seat, frame: Frame) -> Frame:
        kv_cache = choice(frame, "kv_cache", KvCache)
        reset = kv_cache is KvCache.RESET
        async with self._turn:
            if self._stale and reset:
                await self._reset_caches()
            if self._stale and self._take_extras is not None and frame["extras"] is not None:
                await self._take_extras(frame["extras"])
            self._stale = False
            if kv_cache is KvCache.SALT_BY_VERSION and self._salts is None:
                self._salts = _Salts(self._engine)
        self.version = f"{frame['run']}.{frame['step']}"
        return {"type": "done", "caches": ["prefix", "multimodal", "encoder"] if reset else []}

    async def _resume_rank(self, rank: int, seat: _Seat, frame: Frame) -> Frame:
        seat.serves = True
        self._fail_waiting(f"rank {rank} serves on")
        async with self._turn:
            if self._paused and len(self._seats) == self._ranks and all(other.serves for other in self._seats.values()):
                await self._engine.update_weight_version(f"{frame['run']}.{frame['step']}")
                await self._engine.resume_generation()
                self._paused = False
        return {"type": "done"}

    async def _pause(self, in_flight: InFlight) -> None:
        async with self._turn:
            if not self._paused:
                if self._salts is not None:
                    self._salts.turn()
                await self._engine.pause_generation(mode=_PAUSES[in_flight], clear_cache=False)
                self._paused = True

    async def _apply(self) -> None:
        """In every worker."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        error: Exception | None = None
        try:
            async with self._turn:
                await self._engine.start_weight_update()
                await self._engine.update_weights(WeightTransferUpdateRequest(update_info={}))
                await self._engine.finish_weight_update()
                self._stale = True
        except Exception as raised:
            logger.exception("vLLM could not apply the staged weights")
            error = raised
        self._end_waiting(error)

    async def _reset_caches(self) -> None:
        if not await self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise Misuse("ApplyFailed", "vLLM did not empty its prefix cache")
        await self._engine.reset_mm_cache()
        await self._engine.reset_encoder_cache()

    def _fail_waiting(self, why: str) -> None:
        self._end_waiting(Misuse("EngineRefused", f"the ranks did not apply together: {why}"))

    def _end_waiting(self, error: Exception | None) -> None:
        """Tells all ranks that wait for the others how their apply ended."""
        for seat in self._seats.values():
            applied, seat.applied = seat.applied, None
            if applied is not None and not applied.done():
                applied.set_result(None) if error is None else applied.set_exception(error)


class _Salts:
    """Requests find in the prefix cache only what requests since the last pause have put there: each is given a salt that
    changes with every pause, when it goes to the engine. Those that come during a pause run after it, so they have the
    new one already; a round that is called off costs what the cache holds, and no more."""

    def __init__(self, engine: Any):
        self._salt = secrets.token_hex(8)
        self._send = engine.engine_core.add_request_async
        engine.engine_core.add_request_async = self._add

    def turn(self) -> None:
        """What came until now is not found by what comes from now on."""
        self._salt = secrets.token_hex(8)

    async def _add(self, request: Any) -> None:
        own = request.cache_salt
        request.cache_salt = self._salt if own is None else f"{self._salt}/{own}"
        await self._send(request)


async def _receive(reader: asyncio.StreamReader) -> Frame | None:
    prefix = await reader.read(4)
    if not prefix:
        return None
    prefix += await reader.readexactly(4 - len(prefix))
    (length,) = struct.unpack("<I", prefix)
    if length > FRAME_BYTES_MAX:
        raise ConnectionError(f"frame of {length} bytes")
    return decode(await reader.readexactly(length))
