"""Memory of a GPU that a training rank shares with its agent. The CUDA driver is loaded when it is first needed."""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from collections.abc import Iterator
from typing import Any

from .errors import Misuse
from .wire import Frame

# Allocation on a device, passed as a descriptor, read and written: CU_MEM_ALLOCATION_TYPE_PINNED,
# CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
_PINNED, _DESCRIPTOR, _ON_DEVICE, _READ_WRITE = 1, 1, 1, 3

_WHY = "Take it with `DeviceMemory(nbytes)`, or with cuMemCreate for a POSIX descriptor."


class _Location(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int), ("id", ctypes.c_int)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int)]


class _Driver:
    """libcuda, initialised."""

    def __init__(self, library: str):
        try:
            self._library = ctypes.CDLL(library)
            self.call("cuInit", ctypes.c_uint(0))
        except OSError as error:
            raise Misuse("GpuNotVisible", f"no CUDA driver: {error}") from error

    def code(self, name: str, *arguments: Any) -> int:
        return int(getattr(self._library, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        code = self.code(name, *arguments)
        if code != 0:
            raise Misuse("GpuNotVisible", f"{name} failed with CUDA error {code}")

    @contextlib.contextmanager
    def on(self, ordinal: int) -> Iterator[int]:
        """The primary context of a device is current on this thread meanwhile; gives the device."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        try:
            self.call("cuCtxPushCurrent_v2", context)
            try:
                yield device.value
            finally:
                self.call("cuCtxPopCurrent_v2", ctypes.byref(context))
        finally:
            self.code("cuDevicePrimaryCtxRelease_v2", device)

    def uuid(self, device: int) -> str:
        raw = (ctypes.c_ubyte * 16)()
        self.call("cuDeviceGetUuid_v2", raw, ctypes.c_int(device))
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"


class DeviceMemory:
    """Memory of a training rank on its GPU: this process writes it, its agent reads it where it is.

    It lasts as long as this object, or longer where the agent still has it. All that a step writes must be there, on
    the device, before the step is published: synchronise the stream that wrote it.

    Attributes:
        nbytes: size in bytes.
        fd: the allocation's descriptor.
        device: the GPU, `GPU-` and its UUID.
        address: its first byte, for the device.
    """

    def __init__(self, nbytes: int, *, ordinal: int = 0, library: str = "libcuda.so.1"):
        """Takes memory.

        Args:
            nbytes: at least so many bytes.
            ordinal: number of the GPU in this process, as PyTorch's `device.index`.
            library: the CUDA driver.

        Raises:
            Misuse: there is no driver, no such GPU, or too little memory.
        """
        if nbytes <= 0:
            raise Misuse("Unsupported", f"memory of {nbytes} bytes was asked for")
        self._driver = _Driver(library)
        self._ordinal, self._is_own = ordinal, True
        with self._driver.on(ordinal) as device:
            location = _Location(_ON_DEVICE, device)
            properties = _Properties(_PINNED, _DESCRIPTOR, location)
            page, handle, address = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
            self._driver.call("cuMemGetAllocationGranularity", ctypes.byref(page), ctypes.byref(properties), 0)
            size = ctypes.c_size_t(-(-nbytes // page.value) * page.value)
            none = ctypes.c_uint64(0)
            self._driver.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), none)
            try:
                self._driver.call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), none, none)
                self._driver.call("cuMemMap", address, size, ctypes.c_size_t(0), handle, none)
                access = _Access(location, _READ_WRITE)
                self._driver.call("cuMemSetAccess", address, size, ctypes.byref(access), ctypes.c_size_t(1))
                self.address, self.nbytes = address.value, size.value
                self._show(handle, device)
            finally:
                # The mapping keeps the memory.
                self._driver.code("cuMemRelease", handle)

    @classmethod
    def of(cls, address: int, *, ordinal: int = 0, library: str = "libcuda.so.1") -> DeviceMemory:
        """The allocation that an address lies in, which somebody else in this process took and keeps.

        Raises:
            Misuse: it cannot be passed to another process, as memory of cudaMalloc cannot.
        """
        memory = cls.__new__(cls)
        driver = memory._driver = _Driver(library)
        memory._ordinal, memory._is_own = ordinal, False
        with driver.on(ordinal) as device:
            base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64()
            code = driver.code("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
            code = code or driver.code("cuMemRetainAllocationHandle", ctypes.byref(handle), ctypes.c_void_p(base.value))
            if code != 0:
                message = f"memory at {address:#x} cannot be passed to another process (CUDA error {code})"
                raise Misuse("RegistrationMismatch", message, remedy=_WHY)
            try:
                memory.address, memory.nbytes = base.value, size.value
                memory._show(handle, device)
            finally:
                driver.code("cuMemRelease", handle)
        return memory

    def offset(self, address: int, nbytes: int) -> int:
        """Where something lies in this memory, for `Placed`.

        Raises:
            Misuse: not all of it does.
        """
        begin = address - self.address
        if begin < 0 or begin + nbytes > self.nbytes:
            message = f"{nbytes} bytes at {address:#x} are not all in the allocation of {self.nbytes} at {self.address:#x}"
            remedy = f"Expandable segments put a tensor into several allocations: turn them off. {_WHY}"
            raise Misuse("RegistrationMismatch", message, remedy=remedy)
        return begin

    @property
    def frame(self) -> Frame:
        """As a registration lists it."""
        return {"bytes": self.nbytes, "device": self.device}

    def _show(self, handle: ctypes.c_uint64, device: int) -> None:
        fd = ctypes.c_int(-1)
        code = self._driver.code(
            "cuMemExportToShareableHandle", ctypes.byref(fd), handle, ctypes.c_int(_DESCRIPTOR), ctypes.c_uint64(0)
        )
        if code != 0:
            message = f"memory at {self.address:#x} was not made to be passed to another process (CUDA error {code})"
            raise Misuse("RegistrationMismatch", message, remedy=_WHY)
        self.fd, self.device = fd.value, self._driver.uuid(device)

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)
        if getattr(self, "_is_own", False) and hasattr(self, "address"):
            with self._driver.on(self._ordinal):
                address, size = ctypes.c_uint64(self.address), ctypes.c_size_t(self.nbytes)
                if self._driver.code("cuMemUnmap", address, size) == 0:
                    self._driver.code("cuMemAddressFree", address, size)
