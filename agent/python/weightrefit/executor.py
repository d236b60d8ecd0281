"""The executor in this rank's own process: `libweightrefit.so`, which moves the rank's bytes by NCCL on the rank's own GPU.

Invariants:
* X1: every call of the library releases the interpreter's lock; none calls back.
* X2: the library is stopped once, by the process that started it: a forked child has none of its threads.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pathlib
import weakref

from .errors import ExecutorFailed, Misuse
from .session import Connected

logger = logging.getLogger("weightrefit")

# Where the library is, in place of the one beside this module.
LIBRARY_VARIABLE = "WEIGHTREFIT_LIBRARY"

# `WEIGHTREFIT_INTERFACE` of weightrefit.h.
INTERFACE = 1

_NAME = "libweightrefit.so"


class _Settings(ctypes.Structure):
    """`weightrefit_settings`."""

    _fields_ = [
        ("size", ctypes.c_uint64),
        ("socket", ctypes.c_char_p),
        ("seat", ctypes.c_char_p),
        ("cuda_library", ctypes.c_char_p),
        ("nccl_library", ctypes.c_char_p),
        ("window_bytes", ctypes.c_uint64),
        ("device", ctypes.c_uint32),
        ("patience_ms", ctypes.c_uint32),
    ]


class RankClient(Connected):
    """A client that speaks for one rank, whose bytes an executor in this process may move."""

    seat: str

    def __init__(self, socket: str | None):
        super().__init__(socket)
        self._executor: Executor | None = None
        self._told_executor = False

    def start_executor(
        self,
        device: int,
        *,
        library: str | None = None,
        cuda_library: str | None = None,
        nccl_library: str | None = None,
        window_bytes: int = 0,
        timeout: float = 60.0,
    ) -> None:
        """Starts the executor of this rank: NCCL then runs in this process, on its GPU. Before `register`, so that the
        first round has it, and after the last fork. It works until `close`.

        Args:
            device: the rank's GPU, as CUDA counts those that this process sees.
            library: path of `libweightrefit.so`; by default that of `WEIGHTREFIT_LIBRARY`, else the wheel's.
            cuda_library: path of libcuda, in place of the system's.
            nccl_library: path of libnccl, in place of the loader's. All ranks must have the same version.
            window_bytes: device memory for what one replica has on its way; 0 is 2 GiB.
            timeout: seconds for which the agent may be away.

        Raises:
            ExecutorFailed: no library, no GPU or no NCCL; an agent that refuses, or stays away.
        """
        if self._path is None:
            return
        if self._executor is not None:
            raise Misuse("Unsupported", "this rank has an executor already", rank=self.seat)
        self._executor = Executor(
            self._path,
            self.seat,
            device=device,
            library=library,
            cuda_library=cuda_library,
            nccl_library=nccl_library,
            window_bytes=window_bytes,
            timeout=timeout,
        )

    def close(self) -> None:
        """Stops the executor, and ends the connection; calls that wait raise `Closed`."""
        if self._executor is not None:
            self._executor.stop()
        super().close()

    def _check_executor(self) -> None:
        """Raises once kernels may run for ever in this process. Any other end of the executor leaves TCP."""
        error = None if self._executor is None else self._executor.error()
        if error is None:
            return
        if error.code == "AgentWedged":
            raise error
        if not self._told_executor:
            self._told_executor = True
            logger.warning("bytes of %s go by TCP: %s", self.seat, error)


class Executor:
    """An executor of one rank; `RankClient.start_executor` makes it."""

    def __init__(
        self,
        socket: str,
        seat: str,
        *,
        device: int,
        timeout: float,
        library: str | None = None,
        cuda_library: str | None = None,
        nccl_library: str | None = None,
        window_bytes: int = 0,
    ):
        """Starts it, and waits until the agent has taken it."""
        self._seat = seat
        self._library = library = _load(library, seat)
        settings = _Settings(
            ctypes.sizeof(_Settings),
            os.fsencode(socket),
            seat.encode(),
            None if cuda_library is None else os.fsencode(cuda_library),
            None if nccl_library is None else os.fsencode(nccl_library),
            window_bytes,
            device,
            min(int(timeout * 1000), 2**32 - 1),
        )
        handle = ctypes.c_void_p()
        if library.weightrefit_start(ctypes.byref(settings), ctypes.byref(handle)):
            raise self._error()
        self._handle = handle
        self._stop = weakref.finalize(self, _stop, library, handle, os.getpid())

    @property
    def version(self) -> str:
        """Of the library."""
        version: bytes = self._library.weightrefit_version()
        return version.decode()

    def error(self) -> ExecutorFailed | None:
        """Why it works no more, if so."""
        failed = self._stop.alive and self._library.weightrefit_check(self._handle)
        return self._error() if failed else None

    def stop(self) -> None:
        """Aborts what it moves, and waits for the end. Nothing happens where it is stopped."""
        self._stop()

    def _error(self) -> ExecutorFailed:
        code: bytes = self._library.weightrefit_error_code()
        text: bytes = self._library.weightrefit_error_text()
        return ExecutorFailed(code.decode(), text.decode(errors="replace"), rank=self._seat)


def _stop(library: ctypes.CDLL, handle: ctypes.c_void_p, pid: int) -> None:
    if os.getpid() == pid:  # X2
        library.weightrefit_stop(handle)


def _load(given: str | None, seat: str) -> ctypes.CDLL:
    """The library that was named, that of the environment, or the one beside this module."""
    path = given or os.environ.get(LIBRARY_VARIABLE) or str(pathlib.Path(__file__).with_name(_NAME))
    try:
        library = ctypes.CDLL(path)
        library.weightrefit_interface.restype = ctypes.c_uint32
        interface = library.weightrefit_interface()
    except (OSError, AttributeError) as error:
        remedy = f"Install a wheel of weightrefit that has programs, or set {LIBRARY_VARIABLE} to the library's path."
        raise ExecutorFailed("TransportUnavailable", f"no executor at {path}: {error}", rank=seat, remedy=remedy) from error
    if interface != INTERFACE:
        message = f"{path} has interface {interface}, this package was made for {INTERFACE}"
        raise ExecutorFailed("VersionSkew", message, rank=seat)
    for name in ("version", "error_code", "error_text"):
        getattr(library, f"weightrefit_{name}").restype = ctypes.c_char_p
    for name in ("start", "check", "stop"):
        getattr(library, f"weightrefit_{name}").restype = ctypes.c_uint32
    library.weightrefit_start.argtypes = [ctypes.POINTER(_Settings), ctypes.POINTER(ctypes.c_void_p)]
    library.weightrefit_check.argtypes = library.weightrefit_stop.argtypes = [ctypes.c_void_p]
    return library
